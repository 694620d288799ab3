"""Finds the fastest micro-batch size that fits, inside one running process. Imports no torch.

``ramp`` is a generator: it yields the windows that it needs, and receives their measurements. Its
tests therefore need neither a model nor a device.

Activations grow linearly with the chunk (Huang et al., 2019; ``docs/explanation/micro-batch.md``).
Two small sizes give a line, and the line gives the largest size that fits. A further window
confirms that size. Chunks need not be even: the graph of one large chunk is kept, and the other
chunks are recomputed at no larger a size. If nothing is recomputed, chunks are even. A batch in one
chunk is special: no gradients of earlier chunks exist during its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autofit.worker.records.medians import spread
from autofit.worker.records.trials import STEPS, Measurement

SHORT = 2
"""Steps of a window that gives one point of the line."""
FEWEST = 3
"""Fewest steps of a window whose time decides: one slow step among three is not the median."""
MOST = 20
"""Steps after which a deciding window ends, although its median is not known to ``TIE``."""
TIE = 0.02
"""Relative difference below which two times are a tie; the leaner size then wins."""
LONG = 8.0
"""Seconds after which a window ends early, so that a trial does not take too long."""
NEAR = 0.05
"""A plan is compiled at a larger size if the size search found it at most this share slower."""
RECOMPILE = 30.0
"""Seconds to compile up to which a plan is compiled again at a larger size."""
HOPE = 1.1
"""One chunk is tried if its expected peak is at most this multiple of the budget."""
KEPT = 0.75
"""Least share of a chunk's time that is no recomputation: a backward pass takes two forwards."""
FEW = 8
"""Up to so many samples, one chunk is tried even without a line."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to measure ``steps`` steps in chunks of at most ``micro_batch`` samples."""

    micro_batch: int
    steps: int
    blocks: int | None = None
    """Blocks to checkpoint; ``None`` for as many as the plan says."""


Key = TypeVar("Key")
Ramp = Generator[Ask, Measurement | None, Measurement | None]
"""Receives ``None`` if memory ran out; returns the winner, or ``None`` if no size fits."""


def ramp(
    batch: int,
    budget: int,
    steps: int,
    *,
    whole_fits: bool,
    even: Callable[[], bool] = lambda: False,
    gradients: int = 0,
) -> Ramp:
    """Search the fastest size for calls of ``batch`` samples within ``budget`` bytes.

    ``steps``: the length of the deciding window. ``whole_fits``: the script fits without a plan, so
    one chunk is tried first. ``even``: tells whether the measured steps ran in even chunks.
    ``gradients``: bytes of all gradients, which do not exist during the forward of a single chunk.
    """
    found: dict[int, Measurement] = {}
    if whole_fits:
        whole = yield Ask(batch, steps)
        if whole is not None:
            found[batch] = whole
            yield from _downwards(batch, whole, found)
            return (yield from winner(found, steps, Ask))
    line = yield from two_sizes(batch, found)
    if line is None:
        if gradients and not whole_fits and 1 < batch <= FEW:
            whole = yield Ask(batch, steps)
            if whole is not None:
                found[batch] = whole
        return (yield from winner(found, steps, Ask))
    whole_needs = line.at(batch) - gradients
    if not whole_fits and whole_needs <= budget:
        whole = yield Ask(batch, steps)
        if whole is not None:
            found[batch] = whole
            return (yield from winner(found, steps, Ask))
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
    return (yield from winner(found, steps, Ask))


@dataclass(frozen=True, slots=True)
class Line:
    """Peak bytes as a linear function of the samples in a chunk."""

    base: float
    slope: float

    def at(self, size: int) -> float:
        """Return the expected peak with chunks of ``size`` samples."""
        return self.base + self.slope * size

    def largest(self, most: int, budget: int) -> int:
        """Return the largest size up to ``most`` whose expected peak is within ``budget``."""
        return most if self.at(most) <= budget else int((budget - self.base) // self.slope)


def enough(seconds: Sequence[float], steps: int) -> bool:
    """Return whether steps that took ``seconds`` each fill a window of ``steps`` steps.

    A window of the usual length ends early if its steps are long. A longer window never does: its
    user waits for an effect that comes late.
    """
    return long(seconds, steps) or len(seconds) >= steps


def long(seconds: Sequence[float], steps: int) -> bool:
    """Return whether a window of ``steps`` steps ends early, because its steps are long."""
    return steps <= STEPS and len(seconds) >= FEWEST and sum(seconds) >= LONG


def round_ended(seconds: Sequence[float], steps: int) -> bool:
    """Return whether a round of a window's steps has ended with the last step."""
    return long(seconds, steps) or (bool(seconds) and len(seconds) % steps == 0)


def settled(seconds: Sequence[float], steps: int) -> bool:
    """Return whether a window of ``steps`` steps needs no further round.

    Only a window of the usual length has further rounds: until the median is known to ``TIE``.
    """
    if steps != STEPS or long(seconds, steps):
        return True
    return len(seconds) >= MOST or spread(seconds) <= TIE


def least_seconds(seconds: float, size: int, batch: int) -> float:
    """Return what a step takes at least at any larger size, if it takes ``seconds`` at ``size``.

    A larger chunk takes no less time than a smaller one, apart from the recomputation, which a
    single chunk for the whole ``batch`` does not need.
    """
    return KEPT * seconds * min(1.0, size / batch)


def two_sizes(
    batch: int, found: dict[int, Measurement]
) -> Generator[Ask, Measurement | None, Line | None]:
    """Measure two small sizes; return the line through their peaks, ``None`` if one is missing."""
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
    """Return the sizes below the whole batch that should fit, largest first.

    Only even sizes are listed, so that after a wrong prediction the next size is much smaller.
    Unless chunks are ``even``, the largest size of all comes first.
    """
    sizes = {-(-batch // chunks) for chunks in range(2, batch + 1)}
    fitting = {size for size in sizes if line.at(size) <= budget}
    if fitting and not even:
        fitting.add(line.largest(batch - 1, budget))
    return sorted(fitting, reverse=True)


def _downwards(
    batch: int, whole: Measurement, found: dict[int, Measurement]
) -> Generator[Ask, Measurement | None, None]:
    """Halve the chunks while that makes the step faster: caches work better on small kernels."""
    best, size = whole.seconds, batch
    while size > 1:
        size = -(-size // 2)
        measured = yield Ask(size, FEWEST)
        if measured is None:
            return
        found[size] = measured
        if measured.seconds > best * (1 - TIE):
            return
        best = measured.seconds


def winner(found: dict[Key, Measurement], steps: int, ask: Callable[[Key, int], Ask]) -> Ramp:
    """Return the fastest after a full window; among ties, the one with the lowest peak.

    ``ask`` makes the request for a window of so many steps from a key of ``found``.
    """
    while found:
        fastest = min(each.seconds for each in found.values())
        ties = [key for key, each in found.items() if each.seconds <= fastest * (1 + TIE)]
        best = min(ties, key=lambda tie: found[tie].peak_device)
        if enough(found[best].step_seconds, steps):
            return found[best]
        longer = yield ask(best, steps)
        if longer is None:
            del found[best]
        else:
            found[best] = longer
    return None


def size_to_compile(sizes: Mapping[int, Measurement], best: Measurement) -> int:
    """Return the size at which to compile a plan, given the sizes measured without compiling.

    Each chunk has costs that no compiler lowers. So the largest size comes first among those that
    were at most ``NEAR`` slower than ``best``.
    """
    slowest = best.seconds * (1 + NEAR)
    return max(size for size, each in sizes.items() if each.seconds <= slowest)


def larger_size(
    sizes: Mapping[int, Measurement], compiled: Measurement, batch: int, budget: int
) -> int | None:
    """Return the largest size for which a compiled plan should have room; ``None`` if it has none.

    Compiled kernels are fused, and keep fewer activations. Without compiling, ``sizes`` were
    measured: the line through their peaks gives the bytes that do not depend on the size. The peak
    of ``compiled`` then gives the bytes a sample.
    """
    size, smallest, largest = compiled.micro_batch, min(sizes), max(sizes)
    if size >= batch or compiled.compile_seconds > RECOMPILE or smallest == largest:
        return None
    rise = sizes[largest].peak_device - sizes[smallest].peak_device
    slope = max(0.0, rise / (largest - smallest))
    base = sizes[largest].peak_device - slope * largest
    line = Line(base, max(0.0, compiled.peak_device - base) / size)
    even = (-(-batch // chunks) for chunks in range(1, -(-batch // size)))
    return next((each for each in even if line.at(each) <= budget), None)
