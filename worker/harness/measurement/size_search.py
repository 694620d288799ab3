"""Finds the fastest micro-batch size that fits, inside one running process. Imports no torch.

A generator that asks for windows of steps and is sent what was measured, so that the logic needs
neither a model nor a device to be tested.

Activations grow linearly with the chunk (Huang et al., 2019; ``docs/explanation/micro-batch.md``).
Two small sizes give the line, the line gives the largest size that fits, and that one is confirmed.
It need not be even: one large chunk's graph is kept, the rest runs again in chunks no larger.
Where nothing runs again, chunks are even. One chunk is a case of its own: it holds no gradients
during later forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from autofit.worker.records.trials import STEPS, Measurement

SHORT = 2
"""Steps of a window that only gives a point of the line."""
TIE = 0.02
"""Times closer than this are the same; the size that needs less memory is kept."""
LONG = 8.0
"""Seconds after which a window ends early: long steps differ little from one another."""
HOPE = 1.1
"""One chunk is tried when the line says it needs up to this much of the budget."""
FEW = 8
"""Samples of a batch that is tried in one chunk where no line says what it needs."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Measure ``steps`` steps with chunks of at most ``micro_batch`` samples."""

    micro_batch: int
    steps: int


Ramp = Generator[Ask, Measurement | None, Measurement | None]
"""Sent ``None`` where memory ran out; returns the winner, ``None`` where no size fits."""


def ramp(
    batch: int,
    budget: int,
    steps: int,
    *,
    whole_fits: bool,
    even: Callable[[], bool] = lambda: False,
    gradients: int = 0,
) -> Ramp:
    """Look for the fastest size for calls of ``batch`` samples within ``budget`` bytes.

    ``steps``: of the window that decides. ``whole_fits``: the script as it is fits, so that one
    chunk is worth trying first. ``even``: whether the steps measured so far ran in even chunks.
    ``gradients``: bytes of all gradients, which one chunk alone does not hold during its forward.
    """
    found: dict[int, Measurement] = {}
    if whole_fits:
        whole = yield Ask(batch, steps)
        if whole is not None:
            found[batch] = whole
            yield from _downwards(batch, whole, found)
            return (yield from _winner(found, steps))
    line = yield from _line(batch, found)
    if line is None:
        if gradients and not whole_fits and 1 < batch <= FEW:
            whole = yield Ask(batch, steps)
            if whole is not None:
                found[batch] = whole
        return (yield from _winner(found, steps))
    whole_needs = line.at(batch) - gradients
    if not whole_fits and whole_needs <= budget:
        whole = yield Ask(batch, steps)
        if whole is not None:
            found[batch] = whole
            return (yield from _winner(found, steps))
    for size in _candidates(batch, line, budget, even()):
        if size in found:
            break
        measured = yield Ask(size, steps)
        if measured is not None:
            found[size] = measured
            break
    nearly = budget < whole_needs <= HOPE * budget and max(found) >= batch / 2
    if not whole_fits and nearly:
        whole = yield Ask(batch, steps)
        if whole is not None:
            found[batch] = whole
    return (yield from _winner(found, steps))


@dataclass(frozen=True, slots=True)
class Line:
    """Peak bytes over the chunk's samples."""

    base: float
    slope: float

    def at(self, size: int) -> float:
        """Return the bytes expected with chunks of ``size`` samples."""
        return self.base + self.slope * size

    def largest(self, most: int, budget: int) -> int:
        """Return the largest size up to ``most`` that fits."""
        return most if self.at(most) <= budget else int((budget - self.base) // self.slope)


def enough(seconds: Sequence[float], steps: int) -> bool:
    """Return whether steps that took ``seconds`` each fill a window of ``steps`` steps.

    One longer than usual waits for what may happen late: it has them all.
    """
    long = steps <= STEPS and len(seconds) >= SHORT and sum(seconds) >= LONG
    return long or len(seconds) >= steps


def _line(
    batch: int, found: dict[int, Measurement]
) -> Generator[Ask, Measurement | None, Line | None]:
    """Measure two small sizes; return the line through their peaks, ``None`` without a pair."""
    first, failed = -(-batch // 8), 0
    while (measured := (yield Ask(first, SHORT))) is None:
        if first == 1:
            return None
        first, failed = max(1, first // 2), first
    found[first] = measured
    second = first * 2
    if second >= batch:
        return Line(measured.peak_device, 0.0)
    longer = None if second == failed else (yield Ask(second, SHORT))
    if longer is None:
        return None
    found[second] = longer
    slope = max(0.0, (longer.peak_device - measured.peak_device) / (second - first))
    return Line(longer.peak_device - slope * second, slope)


def _candidates(batch: int, line: Line, budget: int, even: bool) -> list[int]:
    """Return sizes below the whole, largest first, that the line lets fit.

    The even ones, so that a prediction that fails is followed by a size well below; before them,
    unless chunks are ``even``, the largest.
    """
    sizes = {-(-batch // chunks) for chunks in range(2, batch + 1)}
    fitting = {size for size in sizes if line.at(size) <= budget}
    if fitting and not even:
        fitting.add(line.largest(batch - 1, budget))
    return sorted(fitting, reverse=True)


def _downwards(
    batch: int, whole: Measurement, found: dict[int, Measurement]
) -> Generator[Ask, Measurement | None, None]:
    """Halve the chunks as long as that makes the step faster (caches, smaller kernels)."""
    best, size = whole.seconds, batch
    while size > 1:
        size = -(-size // 2)
        measured = yield Ask(size, SHORT)
        if measured is None:
            return
        found[size] = measured
        if measured.seconds > best * (1 - TIE):
            return
        best = measured.seconds


def _winner(found: dict[int, Measurement], steps: int) -> Ramp:
    """Return the fastest, the leanest of those that tie, once it holds over a full window."""
    while found:
        fastest = min(each.seconds for each in found.values())
        ties = [size for size, each in found.items() if each.seconds <= fastest * (1 + TIE)]
        size = min(ties, key=lambda tie: found[tie].peak_device)
        if enough(found[size].step_seconds, steps):
            return found[size]
        longer = yield Ask(size, steps)
        if longer is None:
            del found[size]
        else:
            found[size] = longer
    return None
