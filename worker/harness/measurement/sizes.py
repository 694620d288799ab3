"""Finds the fastest chunk and number of checkpointed blocks that fit. Imports no torch.

``solve`` is a generator: it yields what it wants measured, and receives the measurement. A trial
answers with a probe of one chunk, or with a window of real steps. Tests need neither.

The peak is linear in the samples of a chunk, and in these samples times the blocks that do not run
again. So two sizes and two numbers of blocks give the whole plane. What it predicts is measured
before it counts.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

from autofit.worker.records.trials import Measurement

PART = 8
"""The first chunk is this part of the batch: a small one fits under most budgets."""
MARGIN = 0.02
"""Share of the budget that a predicted peak leaves free: the plane is not exact."""
TIE = 0.02
"""Relative difference below which two times are equal; fewer chunks, then fewer blocks, win."""
TRIES = 3
"""Times that one number is made leaner after its prediction did not fit."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to measure a plan at these numbers."""

    micro_batch: int
    """Samples in the largest chunk."""
    blocks: int | None = None
    """Blocks to checkpoint; ``None`` for as many as the plan says."""


Solver = Generator[Ask, Measurement | None, Measurement | None]
"""Receives ``None`` if memory ran out; returns the winner, or ``None`` if nothing fits."""
Measuring = Generator[Ask, Measurement | None, Measurement | None]


def even(batch: int, largest: int) -> int:
    """Return the size of chunks that are as even as possible and no larger than ``largest``."""
    chunks = math.ceil(batch / max(1, min(batch, largest)))
    return math.ceil(batch / chunks)


def solve(
    batch: int, budget: int, *, static: int = 0, blocks: int | None = None, splits: bool = True
) -> Solver:
    """Search the numbers under which a step is fastest within ``budget`` bytes.

    Args:
        batch: Samples in a call of the model.
        budget: Bytes that the process may occupy on the device.
        static: Bytes that it occupies before a call; 0 if unknown.
        blocks: Blocks that may be checkpointed; ``None`` if the plan has a number of its own.
        splits: Whether the batch may be cut into chunks.
    """
    search = _Search(batch, budget, static, blocks, splits)
    yield from search.run()
    return search.winner()


class _Search:
    """One search, with everything that was measured so far."""

    def __init__(
        self, batch: int, budget: int, static: int, blocks: int | None, splits: bool
    ) -> None:
        self._batch, self._budget = batch, budget
        self._static, self._most, self._splits = static, blocks, splits
        self._found: dict[tuple[int, int], Measurement | None] = {}

    def winner(self) -> Measurement | None:
        """Return the fastest measurement; of equal ones that with fewest chunks, then blocks."""
        fitting = {point: each for point, each in self._found.items() if each is not None}
        if not fitting:
            return None
        fastest = min(each.seconds for each in fitting.values())
        equal = [point for point, each in fitting.items() if each.seconds <= fastest * (1 + TIE)]
        return fitting[max(equal, key=lambda point: (point[0], -point[1]))]

    def run(self) -> Generator[Ask, Measurement | None, None]:
        """Measure the points that decide."""
        small = even(self._batch, math.ceil(self._batch / PART)) if self._splits else self._batch
        yield from self._largest(small, 0)
        if self._whole_fits(0) or not self._most:
            return
        yield from self._fewest_blocks(small)
        if not self._whole_fits(self._most) and self._splits:
            yield from self._largest(small, self._most)

    def _measure(self, size: int, blocks: int) -> Measuring:
        """Measure one point, once."""
        if (size, blocks) not in self._found:
            asked = Ask(size, None if self._most is None else blocks)
            self._found[size, blocks] = yield asked
        return self._found[size, blocks]

    def _whole_fits(self, blocks: int) -> bool:
        return any(
            size == self._batch and number <= blocks and each is not None
            for (size, number), each in self._found.items()
        )

    def _largest(self, small: int, blocks: int) -> Generator[Ask, Measurement | None, None]:
        """Measure the largest chunk that fits with so many blocks checkpointed."""
        size = small
        while (yield from self._measure(size, blocks)) is None:
            if size == 1 or not self._splits or (blocks == 0 and self._most):
                return  # checkpointing frees more than a smaller chunk does
            size = even(self._batch, size // 2)
        for _ in range(TRIES):
            found = self._predicted_size(blocks)
            if found <= size:
                return
            if (yield from self._measure(found, blocks)) is not None:
                size = found

    def _predicted_size(self, blocks: int) -> int:
        """Return the largest size expected to fit that was not refused before."""
        slope, rest = self._line(blocks)
        short = [size for (size, at), each in self._found.items() if at == blocks and each is None]
        most = min([self._batch, *(each - 1 for each in short)])
        room = (1 - MARGIN) * self._budget - rest
        most = most if slope <= 0 else min(most, math.floor(room / slope))
        return even(self._batch, most) if most >= 1 else 0

    def _line(self, blocks: int) -> tuple[float, float]:
        """Return the bytes of a sample, and those of everything else, at a number of blocks."""
        points = sorted(
            (size, each.peak_device)
            for (size, at), each in self._found.items()
            if at == blocks and each is not None
        )
        (low, first), (high, last) = points[0], points[-1]
        if low == high:
            return max(0.0, first - self._static) / low, float(min(first, self._static))
        slope = (last - first) / (high - low)
        return slope, last - slope * high

    def _fewest_blocks(self, small: int) -> Generator[Ask, Measurement | None, None]:
        """Measure the whole batch with as few checkpointed blocks as fit."""
        assert self._most, "there are blocks to checkpoint"
        size = small
        while (yield from self._measure(size, self._most)) is None:
            if size == 1 or not self._splits:
                return
            size = even(self._batch, size // 2)
        held, rest = self._line(self._most)
        expected = rest + held * self._batch
        if expected > (1 - MARGIN) * self._budget:
            if expected > self._budget * (1 + PART * MARGIN) and self._splits:
                return  # the chunk is made smaller instead
            yield from self._measure(self._batch, self._most)
            return
        plain = self._line(0)[0] if self._has(0) else None
        if plain is None:  # nothing fits without checkpointing: begin with half of the blocks
            number = self._most // 2
        else:
            room = (1 - MARGIN) * self._budget - expected
            freed = max(plain - held, 0.0) * self._batch / self._most
            number = self._most - (math.floor(room / freed) if freed else self._most)
        for _ in range(TRIES):
            number = min(max(number, 1), self._most)
            if (yield from self._measure(self._batch, number)) is not None:
                return
            if number == self._most:
                return
            number += max(1, (self._most - number + 1) // 2)

    def _has(self, blocks: int) -> bool:
        return any(at == blocks and each is not None for (_, at), each in self._found.items())
