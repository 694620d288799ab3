"""Messages about a run that ran out of memory: where it did, and what would help."""

from __future__ import annotations

from collections.abc import Iterator

from autofit import strategies
from autofit.analysis.fallback import FallbackContext
from autofit.plan import Plan
from autofit.strategies import AUTO, Memory
from autofit.units import format_size
from autofit.worker.records.trials import CHECK, CHECK_STARVED, OutOfMemory

BY_HAND = {
    Memory.WEIGHTS: "a smaller model, weights in lower precision, or less data on the device",
    Memory.OPTIMIZER_STATE: "an optimizer that keeps less (8-bit Adam, Adafactor, SGD)",
    Memory.ACTIVATIONS: "a smaller batch in the script",
    Memory.WORKSPACE: "a smaller batch in the script, or that work inside the model's forward",
}
"""Advice for the user if no technique is left."""
IN_USE = {
    Memory.WEIGHTS: "a smaller model, or less data on the device",
    Memory.OPTIMIZER_STATE: "a smaller model, or an optimizer without state (SGD)",
}
"""Advice if the plan already lowers that kind of memory."""

PROCESS = "the process"
"""Phase of a process that was killed before it could report its phase."""


def where(found: OutOfMemory, budget: int | None = None) -> str:
    """Return where memory ran out: the line, the bytes requested and the bytes held.

    ``budget``: bytes, ``None`` for no limit. The bytes held are read after the error has left the
    script, and without the allocator's cache. If they and the request fit into the budget, they
    would suggest that memory had not run out, so only the budget is named.
    """
    if found.phase == PROCESS:
        return found.message
    phase = found.phase
    if found.place is not None:
        source = f" (`{found.place.source}`)" if found.place.source else ""
        phase = f"{found.place.line}{source}, {_phase(found)}"
    size = f" with {found.micro_batch} samples at a time" if found.micro_batch else ""
    parts = [CHECK_STARVED if found.phase == CHECK else f"out of memory in {phase}{size}"]
    if found.requested:
        parts.append(f"{format_size(found.requested)} requested")
    if budget and (found.requested or 0) + (found.held or 0) <= budget:
        parts.append(f"{format_size(budget)} allowed")
    elif found.held is not None:
        of = f" of {format_size(budget)}" if budget else ""
        parts.append(f"{format_size(found.held)}{of} held by tensors")
    return ", ".join(parts)


def advice(found: OutOfMemory, plan: Plan, context: FallbackContext) -> str:
    """Return what would help: the techniques that are left, or what the user can change."""
    short = lacking(found)
    lowered = Memory.ACTIVATIONS if short is Memory.WORKSPACE else short
    left = list(_left(lowered, plan, context))
    by_hand = BY_HAND[short]
    if short in IN_USE and any(short in strategy.lowered(level) for strategy, level in plan):
        by_hand = IN_USE[short]
    if short is Memory.WORKSPACE:
        reason = "splitting the batch does not lower the memory of computations outside the model"
        techniques = f"; {_either(left)} would free memory for them" if left else ""
        return f"{reason}{techniques}; else {by_hand}"
    if left:
        return f"{_either(left)} would lower its {lowered}"
    return f"no technique lowers its {lowered} further; what is left is {by_hand}"


def lacking(found: OutOfMemory) -> Memory:
    """Return the kind of memory that ran out; workspace for computations outside the model."""
    if found.phase == "optimizer step":
        return Memory.OPTIMIZER_STATE
    if found.phase == "outside the model":
        return Memory.WORKSPACE if found.started else Memory.WEIGHTS
    return Memory.ACTIVATIONS


def _phase(found: OutOfMemory) -> str:
    if found.phase == "outside the model" and not found.started:
        return "before the model first ran"
    return found.phase


def _left(kind: Memory, plan: Plan, context: FallbackContext) -> Iterator[str]:
    """Yield the next level of each strategy that lowers ``kind``, by its name in messages.

    Levels that were refused for this script are skipped.
    """
    for strategy in strategies.REGISTRY:
        names, now = [level.name for level in strategy.levels], plan[strategy.name]
        further = names[names.index(now) + 1 :] if now in names else names[-1:]
        named = [level for level in further if level != AUTO]
        levels = named or strategy.leaner_levels(now, context.facts)
        allowed = (
            level
            for level in levels
            if kind in strategy.lowered(level)
            and context.allows(strategy.name, level)
            and not context.was_refused(plan.replace(**{strategy.name: level}))
        )
        yield from (strategy.describe(level) for level in list(allowed)[:1])


def _either(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
