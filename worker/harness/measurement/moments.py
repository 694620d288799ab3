"""Turns the log of allocations into what held the memory at the peak of each phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from autofit.strategies.activation_offload.saved_tensors import SMALL, WINDOW
from autofit.worker.harness.measurement.allocations import Allocation, AllocationLog, Operation
from autofit.worker.harness.torch_state import frames
from autofit.worker.records.inspection import Block, Kind, Moment, Part

FORWARD, BACKWARD, STEP = "forward", "backward", "optimizer step"
"""Phases of a step. Forward ends where backward begins, so the loss is a part of it."""
MOST = 4000
"""Most parts in the record of a moment."""
Backwards = Sequence[tuple[int, int]]
"""Indices of the first and the last operation of each backward pass."""


def moments(
    log: AllocationLog,
    backwards: Backwards,
    blocks: Mapping[str, nn.Module],
    *,
    classes: int,
    output: int,
) -> tuple[Moment, ...]:
    """Return the peak of each measured phase, the highest first.

    Args:
        log: The allocations, with their roles marked.
        backwards: The backward passes of the measured steps.
        blocks: The model's repeated blocks by path.
        classes: Outputs of the model's head; 0 without a head.
        output: Bytes of the model's output.
    """
    found = [_moment(log, peak, backwards, blocks, classes, output) for peak in log.peaks.values()]
    return tuple(sorted(found, key=lambda each: -each.peak))


def failed_moment(log: AllocationLog) -> Moment | None:
    """Return what held the memory when an allocation failed; ``None`` if none did."""
    if log.failed is None:
        return None
    return _moment(log, log.failed, (), {}, 0, 0, living=log.existing())


def _moment(
    log: AllocationLog,
    peak: Operation,
    backwards: Backwards,
    blocks: Mapping[str, nn.Module],
    classes: int,
    output: int,
    living: list[Allocation] | None = None,
) -> Moment:
    existing = log.at(peak.index) if living is None else living
    kinds = [(each, _kind(each, peak, backwards)) for each in existing]
    activations = [each for each, kind in kinds if kind is Kind.ACTIVATIONS]
    wide = [each for each, kind in kinds if kind in (Kind.ACTIVATIONS, Kind.TEMPORARY)]
    return Moment(
        phase=peak.phase,
        peak=peak.peak,
        parts=(*_parts(kinds), *_rest(existing, peak)),
        operation=peak.name,
        halved=sum(_halved(each) for each in activations if each.lowered),
        cast=sum(each.size for each in existing if each.role == Kind.WEIGHTS and each.lowered),
        logits=sum(each.size for each in wide if classes and each.width == classes),
        logit=max((each.size for each in wide if classes and each.width == classes), default=0),
        quantized=sum(
            each.size for each in existing if each.role == Kind.OPTIMIZER_STATE and each.lowered
        ),
        offloaded=_offloaded(activations),
        output=output,
        blocks=tuple(_blocks(activations, blocks)),
    )


def _kind(each: Allocation, peak: Operation, backwards: Backwards) -> Kind:
    """Return what an allocation was for at a peak.

    A tensor of a forward pass is an activation if it still existed when its backward pass began.
    """
    if each.role:
        return Kind(each.role)
    if each.step < peak.step:
        return Kind.OTHER
    if each.phase == FORWARD:
        begins = next((first for first, _ in backwards if first >= each.born), None)
        needed = each.died is None or begins is None or each.died >= begins
        return Kind.ACTIVATIONS if needed else Kind.TEMPORARY
    if each.phase == BACKWARD:
        return (
            Kind.ACTIVATIONS if each.module else Kind.TEMPORARY
        )  # a checkpointed block runs again
    return Kind.TEMPORARY if each.phase == STEP else Kind.OTHER


def _parts(kinds: Iterable[tuple[Allocation, Kind]]) -> list[Part]:
    """Return the parts of the tensors, the largest first; small ones beyond ``MOST`` are joined."""
    groups: dict[tuple[object, ...], list[tuple[Allocation, Kind]]] = defaultdict(list)
    for each, kind in kinds:
        groups[kind, each.module, each.line, each.operation].append((each, kind))
    parts = [_part([each for each, _ in group], group[0][1]) for group in groups.values()]
    parts.sort(key=lambda part: -part.size)
    rest: dict[Kind, list[Part]] = defaultdict(list)
    for part in parts[MOST:]:
        rest[part.kind].append(part)
    joined = [
        Part(kind=kind, size=sum(p.size for p in each), count=sum(p.count for p in each))
        for kind, each in rest.items()
    ]
    return parts[:MOST] + joined


def _part(group: Sequence[Allocation], kind: Kind) -> Part:
    largest = max(group, key=lambda each: each.size)
    return Part(
        kind=kind,
        size=sum(each.size for each in group),
        count=len(group),
        module=largest.module,
        place=None if largest.line is None else frames.place_at(*largest.line),
        operation=largest.operation,
    )


def _rest(existing: Iterable[Allocation], peak: Operation) -> list[Part]:
    """Return what no tensor explains: differences of the allocator's own counters."""
    held = sum(each.size for each in existing)
    before = sum(each.size for each in existing if each.born < peak.index)
    libraries = max(0, min(peak.before - before - peak.rounding, peak.peak - held - peak.rounding))
    workspace = peak.peak - held - peak.rounding - libraries
    found = [
        Part(kind=Kind.ROUNDING, size=peak.rounding),
        Part(kind=Kind.LIBRARIES, size=libraries),
        Part(kind=Kind.WORKSPACE, size=workspace, operation=peak.name),
    ]
    return [part for part in found if part.size]


def _halved(each: Allocation) -> int:
    """Return the bytes that autocast saves of a tensor: each product that casts it keeps a copy."""
    return each.size - each.size // 2 * max(1, each.casts)


def _offloaded(activations: Sequence[Allocation]) -> int:
    """Return the bytes that ``activation_offload`` moves: of large tensors, except the last."""
    large = [each for each in activations if each.size >= SMALL]
    large.sort(key=lambda each: each.born)
    return sum(each.size for each in large[:-WINDOW])


def _blocks(activations: Sequence[Allocation], blocks: Mapping[str, nn.Module]) -> Iterable[Block]:
    """Yield the activations of each block; its input is what the block before it returned."""
    given = 0
    for path in blocks:
        own = [each for each in activations if f"{each.module}.".startswith(f"{path}.")]
        size = sum(each.size for each in own)
        yield Block(name=path, activations=size, given=given)
        given = max(own, key=lambda each: each.born).size if own else 0
