"""Turns the log of allocations into what held the memory at the peak of each phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from autofit.worker.harness.measurement.allocations import (
    Allocation,
    AllocationLog,
    Line,
    Operation,
)
from autofit.worker.harness.torch_state import frames
from autofit.worker.records.inspection import Part, PeakMoment, SourceLine, TensorKind

FORWARD, BACKWARD, STEP = "forward", "backward", "optimizer step"
"""Phases of a step. Forward ends where backward begins, so the loss is a part of it."""
MOST = 4000
"""Most parts in the record of a moment."""
Backwards = Sequence[tuple[int, int]]
"""Indices of the first and the last operation of each backward pass."""


def moments(log: AllocationLog, backwards: Backwards) -> tuple[PeakMoment, ...]:
    """Return the peak of each measured phase, the highest first.

    ``log``: the allocations, with their roles marked. ``backwards``: the backward passes of the
    measured steps.
    """
    found = [_moment(log, peak, backwards) for peak in log.peaks.values()]
    return tuple(sorted(found, key=lambda each: -each.peak))


def failed_moment(log: AllocationLog) -> PeakMoment | None:
    """Return what held the memory when an allocation failed; ``None`` if none did."""
    if log.failed is None:
        return None
    return _moment(log, log.failed, (), living=log.existing())


def _moment(
    log: AllocationLog,
    peak: Operation,
    backwards: Backwards,
    living: list[Allocation] | None = None,
) -> PeakMoment:
    existing = log.at(peak.index) if living is None else living
    kinds = [(each, _kind(each, peak, backwards)) for each in existing]
    return PeakMoment(
        phase=peak.phase,
        peak=peak.peak,
        parts=(*_parts(kinds), *_rest(existing, peak)),
        operation=peak.name,
    )


def _kind(each: Allocation, peak: Operation, backwards: Backwards) -> TensorKind:
    """Return what an allocation was for at a peak.

    A tensor of a forward pass is an activation if it still existed when its backward pass began.
    """
    if each.role:
        return TensorKind(each.role)
    if each.step < peak.step:
        return TensorKind.OTHER
    if each.phase == FORWARD:
        begins = next((first for first, _ in backwards if first >= each.born), None)
        needed = each.died is None or begins is None or each.died >= begins
        return TensorKind.ACTIVATIONS if needed else TensorKind.TEMPORARY
    if each.phase == BACKWARD:  # a module that runs there is a checkpointed block
        return TensorKind.ACTIVATIONS if each.module else TensorKind.TEMPORARY
    return TensorKind.TEMPORARY if each.phase == STEP else TensorKind.OTHER


def _parts(kinds: Iterable[tuple[Allocation, TensorKind]]) -> list[Part]:
    """Return the parts of the tensors, the largest first; small ones beyond ``MOST`` are joined."""
    groups: dict[tuple[object, ...], list[tuple[Allocation, TensorKind]]] = defaultdict(list)
    for each, kind in kinds:
        groups[kind, each.module, each.lines, each.operation].append((each, kind))
    parts = [_part([each for each, _ in group], group[0][1]) for group in groups.values()]
    parts.sort(key=lambda part: -part.size)
    rest: dict[TensorKind, list[Part]] = defaultdict(list)
    for part in parts[MOST:]:
        rest[part.kind].append(part)
    joined = [
        Part(kind=kind, size=sum(p.size for p in each), count=sum(p.count for p in each))
        for kind, each in rest.items()
    ]
    return parts[:MOST] + joined


def _part(group: Sequence[Allocation], kind: TensorKind) -> Part:
    largest = max(group, key=lambda each: each.size)
    return Part(
        kind=kind,
        size=sum(each.size for each in group),
        count=len(group),
        module=largest.module,
        place=_place(largest.lines.users),
        library=_place(largest.lines.library),
        operation=largest.operation,
    )


def _place(line: Line | None) -> SourceLine | None:
    return None if line is None else frames.place_at(*line)


def _rest(existing: Iterable[Allocation], peak: Operation) -> list[Part]:
    """Return what no tensor explains: differences of the allocator's own counters."""
    held = sum(each.size for each in existing)
    before = sum(each.size for each in existing if each.born < peak.index)
    libraries = max(0, min(peak.before - before - peak.rounding, peak.peak - held - peak.rounding))
    workspace = peak.peak - held - peak.rounding - libraries
    found = [
        Part(kind=TensorKind.ROUNDING, size=peak.rounding),
        Part(kind=TensorKind.LIBRARIES, size=libraries),
        Part(kind=TensorKind.WORKSPACE, size=workspace, operation=peak.name),
    ]
    return [part for part in found if part.size]
