"""Finds how many blocks to checkpoint, inside one running process. Imports no torch.

If the plan leaves the micro-batch size open too, both are found together. ``solve`` is a generator
like ``size_search.ramp``: it yields the windows that it needs, and receives their measurements.

The blocks that run again are the first ones. At the end of forward, each other block holds its
activations, so the peak falls by the same bytes for each further block. The last block is an
exception: while it runs again it holds them all the same. So all blocks need as much as all but
one. The peak is therefore linear in three quantities: the samples in a chunk, the product of these
samples and the blocks that do not run again, and a constant. Three short windows give its line,
and windows at the numbers that should be fastest confirm it.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import NamedTuple

from autofit.worker.harness.measurement.size_search import (
    HOPE,
    SHORT,
    TIE,
    Ask,
    Line,
    Ramp,
    two_sizes,
    winner,
)
from autofit.worker.records.trials import Measurement

MARGIN = 0.02
"""Share of the budget that a predicted peak leaves free: the line is not exact."""
DOUBT = 0.1
"""Share of the bytes beyond those measured by which a prediction may be too low."""
SAVED = 32
"""A block holds at most so many times the bytes of its input."""
WINDOWS = 4
"""Most windows for one size."""
SIZES = 3
"""Most sizes that are measured, of those that should be fastest."""
PRIOR = 0.2
"""Share of a step in which all blocks run again, if no window could measure it."""

Windows = Generator[Ask, Measurement | None, None]


class Point(NamedTuple):
    """What a window measures."""

    size: int
    """Samples in a chunk."""
    blocks: int
    """Blocks that are checkpointed."""


def _ask(point: Point, steps: int) -> Ask:
    return Ask(point.size, steps, point.blocks)


@dataclass(frozen=True, slots=True)
class Device:
    """Peak bytes and step seconds as functions of a point."""

    batch: int
    blocks: int
    line: Line
    """Peak bytes with all blocks checkpointed."""
    block_bytes: float
    """Bytes of a sample in a block that is not checkpointed, beyond those of its input."""
    measured: float = 0.0
    """Most bytes in blocks that are not checkpointed, of all measured points."""
    gradients: int = 0
    """Bytes that a batch in one chunk needs less."""
    seconds: tuple[tuple[float, float], ...] = ((1.0, 0.0),)
    """Number of chunks, and seconds of a step without what runs again; fewest chunks first."""
    block_seconds: float = 0.0
    """Seconds that a block takes to run again, in a step."""
    reruns: bool = False
    """All chunks but one run forward twice."""

    def peak(self, point: Point) -> float:
        """Return the expected peak of a window, with an allowance for what is not measured."""
        whole = point.size == self.batch
        kept = self.block_bytes * point.size * max(0, self.blocks - 1 - point.blocks)
        allowance = DOUBT * max(0.0, kept - self.measured)
        return self.line.at(point.size) - self.gradients * whole + kept + allowance

    def time(self, point: Point) -> float:
        """Return the expected seconds of a step, linear in the chunks between measured sizes.

        Many small chunks take the time to launch kernels, few large ones that of the computation.
        """
        chunks = self.batch / point.size
        after = bisect(self.seconds, chunks, key=lambda each: each[0])
        after = min(max(after, 1), len(self.seconds) - 1)
        (few, less), (many, more) = self.seconds[after - 1], self.seconds[after]
        slope = max(0.0, more - less) / (many - few) if many > few else 0.0
        return max(0.0, less + slope * (chunks - few)) + self.again(point)

    def again(self, point: Point) -> float:
        """Return the expected seconds of what runs again in a step."""
        rerun = self.blocks * (1 - point.size / self.batch) if self.reruns else 0.0
        return self.block_seconds * (point.blocks + rerun)

    def fewest(self, size: int, budget: int, hope: float = 1.0) -> Point | None:
        """Return the point with the fewest blocks that should fit; ``None`` if none should.

        ``hope``: the multiple of the budget up to which one chunk is worth a try.
        """
        all_blocks = Point(size, self.blocks)
        if self.peak(all_blocks) > (hope if size == self.batch else 1.0) * budget:
            return None
        points = (Point(size, blocks) for blocks in range(self.blocks))
        most = (1 - MARGIN) * budget
        return next((each for each in points if self.peak(each) <= most), all_blocks)


def solve(
    batch: int,
    blocks: int,
    budget: int,
    steps: int,
    *,
    splits: bool,
    whole_fits: bool,
    even: Callable[[], bool] = lambda: False,
    gradients: int = 0,
    held: int = 0,
) -> Ramp:
    """Search the fastest number of checkpointed blocks within ``budget`` bytes.

    Args:
        batch: Samples of a call; the only size unless the plan ``splits`` the batch.
        blocks: Blocks of the model, at least two.
        budget: Bytes of the device.
        steps: The length of the deciding windows.
        splits: Whether the size is to be found too.
        whole_fits: Whether the script fits without a plan, so that no block is tried first.
        even: Tells whether the measured steps ran in even chunks.
        gradients: As for ``ramp``.
        held: Bytes that are certainly no activations.
    """
    found: dict[Point, Measurement] = {}
    if whole_fits:
        yield from _measure(Point(batch, 0), steps, found)
        if found:
            return (yield from _fastest(found, steps))
    device = yield from _lines(batch, blocks, budget, found, splits=splits, held=held)
    if device is None:
        return (yield from _fastest(found, steps))
    device = replace(device, gradients=gradients if splits else 0, reruns=splits and not even())
    sizes = _sizes(device, budget) if splits else {batch}
    for tried in range(SIZES):
        device = _fitted(device, found)
        hope, gain = (HOPE, TIE) if tried else (1.0, 0.0)
        points = filter(None, (device.fewest(size, budget, hope) for size in sizes))
        point = min(points, key=lambda each: (device.time(each), -each.size), default=None)
        best = min((each.seconds for each in found.values()), default=math.inf)
        if point is None or device.time(point) > (1 - gain) * best:
            break
        yield from _settle(point, device, budget, steps, found)
        sizes.discard(point.size)
    return (yield from _fastest(found, steps))


def _fastest(found: dict[Point, Measurement], steps: int) -> Ramp:
    """Return the fastest measurement after a full window.

    Of one size only the point with the fewest blocks counts, because a block that runs again takes
    time. If more blocks look faster, other processes have slowed the device meanwhile. A point at
    which the allocator strained hides no other one.
    """
    while found:
        easy = [point for point, each in found.items() if not each.strained]
        fewest = {point.size: point.blocks for point in sorted(easy, reverse=True)}
        kept = {p: each for p, each in found.items() if p.blocks <= fewest.get(p.size, p.blocks)}
        for point in kept:
            del found[point]
        best = yield from winner(kept, steps, _ask)
        if best is not None:
            return best
    return None


def _measure(point: Point, steps: int, found: dict[Point, Measurement]) -> Windows:
    """Measure a point, and keep the measurement if it fits."""
    measured = yield _ask(point, steps)
    if measured is not None:
        found[point] = measured


def _lines(
    batch: int,
    blocks: int,
    budget: int,
    found: dict[Point, Measurement],
    *,
    splits: bool,
    held: int,
) -> Generator[Ask, Measurement | None, Device | None]:
    """Measure the lines of the peak; return ``None`` if a point of them does not fit."""
    line: Line | None
    if splits:
        sizes: dict[int, Measurement] = {}
        line = yield from _checkpointed(two_sizes(batch, sizes), blocks)
        found.update({Point(size, blocks): each for size, each in sizes.items()})
        size = max(sizes, default=batch)
    else:
        size = batch
        yield from _measure(Point(size, blocks), SHORT, found)
        line = Line(found[Point(size, blocks)].peak_device, 0.0) if found else None
    if line is None:
        return None
    peak = found[Point(size, blocks)].peak_device
    # At worst all activations but the blocks' inputs are in the block that runs again.
    room = max(0, budget - peak) / max(1, peak - held) * (1 + blocks / SAVED)
    fewer = min(blocks, max(2, 1 + int(room)))
    point = Point(size, blocks - fewer)
    yield from _measure(point, SHORT, found)
    return Device(batch, blocks, line, block_bytes=max(1.0, budget - peak) / size)


def _checkpointed(
    sizes: Generator[Ask, Measurement | None, Line | None], blocks: int
) -> Generator[Ask, Measurement | None, Line | None]:
    """Answer the requests of ``sizes`` with measurements under checkpointing of all blocks."""
    measured = None
    while True:
        try:
            ask = sizes.send(measured)
        except StopIteration as end:
            line: Line | None = end.value
            return line
        measured = yield replace(ask, blocks=blocks)


def _fitted(device: Device, found: dict[Point, Measurement]) -> Device:
    """Return ``device`` with the bytes and times of the measurements, those of large chunks first.

    A line through small chunks can be far off for large ones.
    """
    by_size = [
        sorted(point for point in found if point.size == size)
        for size in sorted({point.size for point in found}, reverse=True)
    ]
    ends = next(((each[0], each[-1]) for each in by_size if len(each) > 1), None)
    last = by_size[0][-1]
    again = PRIOR * found[last].seconds / device.blocks
    if ends is not None:
        few, many = ends
        saved = found[many].seconds - found[few].seconds
        again = max(0.0, saved) / (many.blocks - few.blocks)
        kept = min(many.blocks, device.blocks - 1) - few.blocks
        freed = found[few].peak_device - found[many].peak_device
        if kept > 0:
            more = max(0.0, freed / kept / few.size)
            device = replace(device, block_bytes=more, measured=max(0, freed))
    device = replace(device, block_seconds=again)
    largest = (each[-1] for each in by_size)
    rests = ((device.batch / p.size, found[p].seconds - device.again(p)) for p in largest)
    return replace(device, seconds=tuple(rests))


def _sizes(device: Device, budget: int) -> set[int]:
    """Return the sizes among which to choose: those of even chunks, and the largest that fits."""
    batch = device.batch
    sizes = {-(-batch // chunks) for chunks in range(1, batch + 1)}
    if device.reruns and batch > 1:
        sizes.add(min(batch - 1, max(1, device.line.largest(batch - 1, budget))))
    return sizes


def _settle(
    point: Point, device: Device, budget: int, steps: int, found: dict[Point, Measurement]
) -> Windows:
    """Measure a size at ``point`` and correct the number of blocks, within ``WINDOWS`` windows.

    After a shortage more blocks are checkpointed. If the measured peak leaves room for fewer, and
    these would save time, they are tried.
    """
    size, blocks = point
    short, fits, least = -1, device.blocks + 1, 0.0
    for _ in range(WINDOWS):
        measured = found.get(Point(size, blocks))
        if measured is None or len(measured.step_seconds) <= SHORT:
            yield from _measure(Point(size, blocks), steps, found)
            measured = found.get(Point(size, blocks))
        if measured is None:
            short = blocks
            third = short + max(1, (device.blocks - short + 2) // 3)
            blocks = third if fits > device.blocks else (short + fits + 1) // 2
            if fits < device.blocks and (fits - blocks) * device.block_seconds <= least:
                return
        else:
            fits = blocks
            room = (1 - MARGIN) * budget - measured.peak_device
            device = _fitted(device, found)
            each = max(1.0, device.block_bytes * size)
            fewer, least = (
                min(blocks - short - 1, int(max(0.0, room) // each)),
                TIE * measured.seconds,
            )
            if fewer * device.block_seconds <= least:
                return
            blocks -= fewer
        if not short < blocks < fits:
            return
