"""Finds the fastest chunk and number of checkpointed blocks that fit. Imports no torch.

``solve`` is a generator: it yields what it wants measured, and receives the measurement. A trial
answers with a probe of one chunk, or with a window of real steps. Tests need neither.

The peak is linear in the samples of a chunk, and in these samples times the blocks that do not run
again. So two sizes and two numbers of blocks give the whole plane. What it predicts is measured
before it counts.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from autofit.worker.records.trials import Measurement

PART = 8
"""The first chunk is this part of the batch: a small one fits under most budgets."""
MARGIN = 0.02
"""Share of the budget that a predicted peak leaves free: the plane is not exact."""
TIE = 0.02
"""Relative difference below which two times are equal; fewer chunks, then fewer blocks, win."""
TRIES = 3
"""Maximum number of predicted sizes, or of predicted numbers of blocks, that are measured."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to measure a plan at these numbers."""

    micro_batch: int
    """Samples in the largest chunk."""
    blocks: int | None = None
    """Blocks to checkpoint; ``None`` for as many as the plan says."""


Solver = Generator[Ask, Measurement | None, Measurement | None]
"""Receives ``None`` if memory ran out; returns the winner, or ``None`` if nothing fits."""
Steps = Generator[Ask, Measurement | None, None]


def even(batch: int, largest: int) -> int:
    """Return the size of chunks that are as even as possible and no larger than ``largest``."""
    chunks = math.ceil(batch / max(1, min(batch, largest)))
    return math.ceil(batch / chunks)


def solve(
    batch: int,
    budget: int,
    *,
    blocks: int | None = None,
    splits: bool = True,
    gradients: int = 0,
) -> Solver:
    """Search the numbers under which a step is fastest within ``budget`` bytes.

    The whole batch comes first if a line through two small chunks says that it fits. Otherwise the
    whole batch with as few checkpointed blocks as fit is compared with the largest chunk that fits
    without checkpointing. If neither fits, all blocks are checkpointed and the chunk is as large as
    it may be.

    Args:
        batch: Samples in a call of the model.
        budget: Bytes that the process may occupy on the device.
        blocks: Blocks that may be checkpointed; ``None`` if the plan has a number of its own.
        splits: Whether the batch may be cut into chunks.
        gradients: Bytes of the gradients that exist while a chunk runs, but not while the whole
            batch does: chunks add to those of the chunks before.
    """
    search = _Search(batch, budget, blocks, splits, gradients)
    yield from search.run()
    return search.winner()


class _Search:
    """One search, with everything that was measured so far."""

    def __init__(
        self, batch: int, budget: int, blocks: int | None, splits: bool, gradients: int
    ) -> None:
        self._batch, self._room, self._gradients = batch, (1 - MARGIN) * budget, gradients
        self._blocks, self._splits = blocks, splits and batch > 1
        self._found: dict[tuple[int, int], Measurement | None] = {}
        """By the samples of a chunk and the number of checkpointed blocks."""

    def winner(self) -> Measurement | None:
        """Return the fastest measurement; of equal ones that with fewest chunks, then blocks."""
        fitting = {point: each for point, each in self._found.items() if each is not None}
        if not fitting:
            return None
        fastest = min(each.seconds for each in fitting.values())
        equal = [point for point, each in fitting.items() if each.seconds <= fastest * (1 + TIE)]
        return fitting[max(equal, key=lambda point: (point[0], -point[1]))]

    def run(self) -> Steps:
        """Measure the points that decide."""
        yield from self._two_sizes(0)
        yield from self._largest(0)
        if self._blocks and not self._fits(self._batch, 0):
            yield from self._two_sizes(self._blocks)
            yield from self._fewest_blocks()
            if not self._whole_fits():
                yield from self._largest(self._blocks)

    def _measure(self, size: int, blocks: int) -> Steps:
        """Measure one point, once."""
        if (size, blocks) not in self._found:
            self._found[size, blocks] = yield Ask(size, blocks if self._blocks else None)

    def _fits(self, size: int, blocks: int) -> bool:
        return self._found.get((size, blocks)) is not None

    def _whole_fits(self) -> bool:
        return any(size == self._batch and found for (size, _), found in self._found.items())

    def _sizes(self, blocks: int) -> list[int]:
        """Return the sizes that fit with so many blocks, ascending."""
        return sorted(size for (size, at), each in self._found.items() if at == blocks and each)

    def _two_sizes(self, blocks: int) -> Steps:
        """Measure two small chunks, which give a line; the whole batch if it is not cut."""
        size = self._batch
        if self._splits:
            size = even(self._batch, math.ceil(self._batch / PART))
        yield from self._measure(size, blocks)
        while self._splits and size > 1 and not self._fits(size, blocks):
            if blocks == 0 and self._blocks:
                return  # checkpointing frees more than a smaller chunk does
            size = even(self._batch, size // 2)
            yield from self._measure(size, blocks)
        if self._fits(size, blocks) and size < self._batch:
            yield from self._measure(double := even(self._batch, 2 * size), blocks)
            if not self._fits(double, blocks) and size > 1:
                yield from self._measure(even(self._batch, size // 2), blocks)

    def _line(self, blocks: int) -> tuple[float, float] | None:
        """Return the bytes of a sample and those of everything else; ``None`` if unknown."""
        sizes = self._sizes(blocks)
        if len(sizes) < 2:
            return None
        low, high = sizes[0], sizes[-1]
        peaks = [each.peak_device for s in (low, high) if (each := self._found[s, blocks])]
        slope = max(0.0, (peaks[1] - peaks[0]) / (high - low))
        return slope, peaks[1] - slope * high

    def _largest(self, blocks: int) -> Steps:
        """Measure the largest chunk that fits with so many blocks."""
        for _ in range(TRIES):
            if (line := self._line(blocks)) is None:
                return
            slope, rest = line
            short = [size for (size, at), each in self._found.items() if at == blocks and not each]
            most = min([self._batch, *(size - 1 for size in short)])
            whole = most == self._batch and rest - self._gradients + slope * most <= self._room
            if slope and not whole:
                most = min(most, math.floor((self._room - rest) / slope))
            largest = max(self._sizes(blocks))
            if most < 1 or (size := even(self._batch, most)) <= largest:
                return
            yield from self._measure(size, blocks)

    def _fewest_blocks(self) -> Steps:
        """Measure the whole batch with as few checkpointed blocks as fit."""
        assert self._blocks, "there are blocks to checkpoint"
        if not self._splits:
            yield from self._fewest_of_the_whole()
            return
        number = self._expected_blocks()
        for _ in range(TRIES):
            if number > self._blocks:
                return
            yield from self._measure(self._batch, number)
            if self._fits(self._batch, number):
                return
            number = self._blocks if number < self._blocks else self._blocks + 1

    def _fewest_of_the_whole(self) -> Steps:
        """Measure the whole batch with fewer blocks, along the line through two that fit."""
        for _ in range(TRIES):
            whole = {at: each for (_, at), each in self._found.items()}
            fitting = sorted(at for at, each in whole.items() if each)
            if not fitting:
                return
            fewest = fitting[0]
            least = 1 + max((at for at, each in whole.items() if not each), default=-1)
            number = (least + fewest) // 2
            if len(fitting) > 1:
                peaks = [each.peak_device for at in fitting[:2] if (each := whole[at])]
                of_block = max(1.0, (peaks[0] - peaks[1]) / (fitting[1] - fewest))
                number = max(least, fewest - math.floor((self._room - peaks[0]) / of_block))
            if number >= fewest:
                return
            yield from self._measure(self._batch, number)

    def _expected_blocks(self) -> int:
        """Return the blocks to checkpoint for the whole batch; more than there are if none fit."""
        assert self._blocks, "there are blocks to checkpoint"
        checkpointed, plain = self._line(self._blocks), self._line(0)
        if checkpointed is None:
            return self._blocks + 1
        slope, rest = checkpointed
        left = self._room - rest + self._gradients - slope * self._batch
        if left < 0:
            return self._blocks + 1
        if plain is None:
            return self._blocks // 2 + 1
        of_block = max(plain[0] - slope, 0.0) * self._batch / self._blocks
        return max(1, self._blocks - (math.floor(left / of_block) if of_block else self._blocks))


def roomier(
    known: Sequence[tuple[Ask, Measurement]],
    now: tuple[Ask, Measurement],
    batch: int,
    budget: int,
    *,
    blocks: int,
    splits: bool,
    gradients: int = 0,
) -> tuple[Ask, ...]:
    """Return faster numbers that should fit, for a plan that needs less memory than expected.

    They are to be measured in turn until one fits.

    A compiled plan is measured at the numbers of the same plan without compilation, and often
    leaves room. Its activations are taken to be the same share of the other plan's at any numbers.

    Args:
        known: The measurements of the plan without compilation.
        now: The measurement of the compiled plan.
        batch, budget, splits, gradients: As for ``solve``.
        blocks: Blocks that may be checkpointed; 0 if none may.
    """
    asked, measured = now
    if len({ask.micro_batch for ask, _ in known}) < 2:
        return ()
    alike = len({ask.blocks or 0 for ask, _ in known}) < 2
    if alike:  # what a block needs is unknown
        known = [(Ask(ask.micro_batch), each) for ask, each in known]
        asked = Ask(asked.micro_batch)

    def with_gradients(ask: Ask, found: Measurement) -> float:
        return float(found.peak_device + (gradients if ask.micro_batch == batch else 0))

    peaks = [with_gradients(*each) for each in known]
    rest, sample, block = _plane([ask for ask, _ in known], peaks)
    held = asked.micro_batch * (sample - (asked.blocks or 0) * block)
    peak = with_gradients(asked, measured)
    if held <= 0 or peak <= rest:
        return ()
    share = (peak - rest) / held
    room = ((1 - MARGIN) * budget - rest) / share
    if alike:
        size = even(batch, math.floor(room / sample)) if splits and room >= sample else 0
        return (Ask(size, now[0].blocks),) if size > asked.micro_batch else ()
    whole = batch * sample - room - gradients / share
    number = 0 if whole <= 0 else math.ceil(whole / (batch * block)) if block > 0 else blocks + 1
    if number <= blocks and (asked.micro_batch < batch or number < (asked.blocks or 0)):
        tried = (number, blocks) if asked.micro_batch < batch else (number,)
        return tuple(Ask(batch, each if blocks else None) for each in dict.fromkeys(tried))
    size = even(batch, math.floor(room / sample)) if splits and room >= sample else 0
    return (Ask(size, asked.blocks and 0),) if size > asked.micro_batch else ()


def _plane(asked: Sequence[Ask], peaks: Sequence[float]) -> tuple[float, float, float]:
    """Return the bytes of everything else, of a sample, and of a sample in a block."""
    rows = [[1.0, ask.micro_batch, -ask.micro_batch * (ask.blocks or 0)] for ask in asked]
    rest, sample, block = np.linalg.lstsq(np.array(rows), np.array(peaks), rcond=None)[0]
    return float(rest), float(sample), float(block)
