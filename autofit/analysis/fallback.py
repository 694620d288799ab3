"""Where a real run goes when it has died for want of memory: one rung leaner, the same training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from autofit import strategies
from autofit.analysis.pruning import refused, tainted
from autofit.analysis.ranking import ranked_sound
from autofit.plan import Plan
from autofit.space.catalogue import clash, expected
from autofit.space.static_memory import KINDS, Static, remaining_share
from autofit.storage import TrialRecord
from autofit.strategies import AS_IS, Facts, Fidelity, Hardware, Memory

LESS = 0.95
"""A measured plan is a rung only where its peak was below this share of the present plan's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackContext:
    """What the next rung is chosen from."""

    hardware: Hardware
    allow: Fidelity
    facts: Facts = field(default_factory=Facts)
    """Of the script, as far as known."""
    trials: Sequence[TrialRecord] = ()
    """Of the study the plan comes from; none where the plan was given."""
    budget: int = 0
    """Bytes the study searched within."""
    refused: frozenset[str] = frozenset()
    """Strategies that have turned out not to keep their promise here."""
    left_out: frozenset[tuple[str, str]] = frozenset()
    """Strategies and levels that the study has left out."""

    def allows(self, name: str, level: str) -> bool:
        """Return whether a level may stand in a rung: here, on this script, as far as allowed."""
        strategy = strategies.get(name)
        return (
            not self._ruled_out(name, level)
            and strategy.fidelity(level, self.facts) <= self.allow
            and strategy.unavailable(level, self.hardware) is None
            and strategy.inapplicable(level, self.facts) is None
        )

    def rules_out(self, plan: Plan) -> bool:
        """Return whether a plan holds what did not keep its promise here, by itself or together."""
        return any(self._ruled_out(*each) for each in plan.changes) or self.was_refused(plan)

    def was_refused(self, plan: Plan) -> bool:
        """Return whether a plan holds all that was refused in a trial."""
        return tainted(plan, refused(self.trials), self.trials)

    def _ruled_out(self, name: str, level: str) -> bool:
        searched = Plan.of({name: level}).searched[name]
        return name in self.refused or (name, searched) in self.left_out


def next_fallback(
    plan: Plan,
    context: FallbackContext,
    tried: Iterable[Plan] = (),
    *,
    activations: bool = True,
    missing: int = 0,
) -> Plan | None:
    """Return the plan to go on with after ``plan`` ran out of memory; ``None`` at the last.

    What the search has measured comes first, the fastest that needed less; then what it has not:
    half the samples at a time, or a level that trades speed for memory, the one expected to lose
    least speed of those that free the bytes ``missing``; lower fidelity than the plan's comes last.
    Fewer ``activations`` only where it is those that do not fit, not the weights or the optimizer's
    state.
    """
    seen = {plan, *tried}
    faithful = max(plan.fidelity(context.facts), Fidelity.REDRAW)

    def order(fallback: Plan) -> tuple[bool, bool, float]:
        freed = _freed(plan, fallback, context)
        lower = fallback.fidelity(context.facts) > faithful
        return lower, freed < missing, -freed if freed < missing else expected(fallback)

    derived = sorted(_derived(plan, context, activations=activations), key=order)
    if not activations:  # it is arithmetic then: what frees too little does not help
        derived = [
            fallback for fallback in derived if _freed(plan, fallback, context) >= max(missing, 1)
        ]
    fallbacks = (*_measured(plan, context), *derived)
    return next(
        (each for each in fallbacks if each not in seen and not context.was_refused(each)), None
    )


def fallbacks_below(
    plan: Plan,
    context: FallbackContext,
    tried: Iterable[Plan] = (),
    *,
    activations: bool = True,
    missing: int = 0,
) -> list[Plan]:
    """Return every rung below ``plan``, the next one first, as ``next_fallback`` gives them."""
    seen, found = {plan, *tried}, list[Plan]()
    while (
        fallback := next_fallback(plan, context, seen, activations=activations, missing=missing)
    ) is not None:
        seen.add(fallback)
        found.append(fallback)
        plan = fallback
    return found


def _measured(plan: Plan, context: FallbackContext) -> Iterator[Plan]:
    plans = {
        trial.report.best or trial.plan: trial.measurement.peak_device
        for trial in ranked_sound(context.trials, context.budget)
        if trial.report is not None and trial.measurement is not None
    }
    if plan not in plans:
        return
    for each, peak in plans.items():
        if not context.rules_out(each) and peak < LESS * plans[plan]:
            yield each


def _derived(plan: Plan, context: FallbackContext, *, activations: bool) -> Iterator[Plan]:
    """Yield the plans that are one level away and trade speed for memory."""
    size = _samples(plan, context)
    if activations and size is not None and size > 1:
        half = str(-(-size // 2))
        if context.allows("micro_batch", half):
            yield plan.replace(micro_batch=half)
    for strategy in strategies.REGISTRY:
        if strategy.name == "micro_batch":
            continue
        now = strategy.level(plan[strategy.name])
        for level in strategy.levels:
            lowered = strategy.lowered(level.name)
            helps = bool(lowered if activations else lowered - {Memory.ACTIVATIONS})
            slower = level.slowdown >= max(1.0, now.slowdown) and level.keeps < now.keeps
            if helps and slower and context.allows(strategy.name, level.name):
                fallback = plan.replace(**{strategy.name: level.name})
                fallback = fallback.unsized if clash(fallback) else fallback
                if not clash(fallback):
                    yield fallback


def _samples(plan: Plan, context: FallbackContext) -> int | None:
    """Return the samples in a chunk; ``None`` while nobody knows."""
    return context.facts.batch if plan["micro_batch"] == AS_IS else int(plan["micro_batch"])


def _freed(plan: Plan, fallback: Plan, context: FallbackContext) -> float:
    """Return the bytes that a rung is expected to free, by arithmetic and what levels promise."""
    static = Static.of(context.facts)
    held = dict(zip(KINDS, (static.weights, static.gradients, static.state), strict=True))
    held[Memory.ACTIVATIONS] = max(0.0, context.budget - sum(held.values()))
    size, smaller = _samples(plan, context), _samples(fallback, context)
    freed = 0.0
    for kind, size_of_kind in held.items():
        before, after = remaining_share(plan, kind), remaining_share(fallback, kind)
        if kind is Memory.ACTIVATIONS and size and smaller:
            after *= smaller / size
        freed += size_of_kind * (before - after) / before
    return freed
