"""The plan with which a run continues after it ran out of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from autofit import strategies
from autofit.analysis.ranking import ranked_sound
from autofit.analysis.verdicts import refused, tainted
from autofit.plan import Plan
from autofit.space.catalogue import clash
from autofit.space.order import expected
from autofit.space.static_memory import freed_bytes
from autofit.storage import TrialRecord
from autofit.strategies import Facts, Fidelity, Hardware, Memory

MAX_PEAK_SHARE = 0.95
"""A measured plan is a fallback only if its peak was below this share of the current plan's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackContext:
    """What the choice of the next fallback depends on."""

    hardware: Hardware
    allow: Fidelity
    facts: Facts = field(default_factory=Facts)
    """What is known of the script."""
    trials: Sequence[TrialRecord] = ()
    """The trials of the study that found the plan. Empty if the user gave the plan."""
    budget: int = 0
    """Memory budget of the study, in bytes of a device."""
    refused: frozenset[str] = frozenset()
    """Names of strategies that failed verification on this script."""
    left_out: frozenset[tuple[str, str]] = frozenset()
    """``(strategy, level)`` pairs that the study ruled out."""

    def allows(self, name: str, level: str) -> bool:
        """Return whether a fallback may use a level.

        The level must be available on this hardware, apply to the script, stay within the allowed
        fidelity, and not be ruled out.
        """
        strategy = strategies.get(name)
        return (
            not self._ruled_out(name, level)
            and strategy.fidelity(level, self.facts) <= self.allow
            and strategy.unavailable(level, self.hardware) is None
            and strategy.inapplicable(level, self.facts) is None
        )

    def rules_out(self, plan: Plan) -> bool:
        """Return whether a plan contains a level, or a set of levels, that was ruled out."""
        return any(self._ruled_out(*each) for each in plan.changes) or self.was_refused(plan)

    def was_refused(self, plan: Plan) -> bool:
        """Return whether a plan contains the levels for which a trial was refused."""
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
    """Return the plan to continue with after ``plan`` ran out of memory; ``None`` if none is left.

    Measured plans with a lower peak come first, the fastest of them before the others. Then come
    plans that differ from ``plan`` by one step: half the micro-batch, or one level that trades
    speed for memory. These are sorted in this order: plans that keep the fidelity of ``plan``,
    plans expected to free ``missing`` bytes, plans with more checkpointed blocks if ``plan`` has a
    number of them, and the smallest expected loss of speed.

    Args:
        plan: The plan that ran out of memory.
        context: What the choice depends on.
        tried: Plans that must not be returned.
        activations: Whether lower activation memory can help. ``False`` if the weights or the
            optimizer state do not fit.
        missing: Bytes that the fallback should free.
    """
    seen, facts = {plan, *tried}, context.facts
    faithful = max(plan.fidelity(facts), Fidelity.REDRAW)

    def freed(fallback: Plan) -> float:
        return freed_bytes(plan, fallback, facts, context.budget)

    def order(fallback: Plan) -> tuple[bool, bool, bool, float]:
        bytes_ = freed(fallback)
        lower, short = fallback.fidelity(facts) > faithful, bytes_ < missing
        same = plan.blocks.isdecimal() and plan.blocks == fallback.blocks
        return lower, short, same, -bytes_ if short else expected(fallback, facts)

    derived = sorted(_derived(plan, context, activations=activations), key=order)
    if not activations:  # arithmetic predicts these bytes: a plan that frees too little cannot help
        derived = [fallback for fallback in derived if freed(fallback) >= max(missing, 1)]
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
    """Return the sequence of fallbacks that repeated calls of ``next_fallback`` give."""
    seen, found = {plan, *tried}, list[Plan]()
    while (
        fallback := next_fallback(plan, context, seen, activations=activations, missing=missing)
    ) is not None:
        seen.add(fallback)
        found.append(fallback)
        plan = fallback
    return found


def _measured(plan: Plan, context: FallbackContext) -> Iterator[Plan]:
    """Yield the measured plans with a clearly lower peak, the fastest first."""
    plans = {
        trial.report.best or trial.plan: trial.measurement.peak_device
        for trial in ranked_sound(context.trials, context.budget)
        if trial.report is not None and trial.measurement is not None
    }
    if plan not in plans:
        return
    for each, peak in plans.items():
        if not context.rules_out(each) and peak < MAX_PEAK_SHARE * plans[plan]:
            yield each


def _derived(plan: Plan, context: FallbackContext, *, activations: bool) -> Iterator[Plan]:
    """Yield the plans that differ by one level and trade speed for memory."""
    for strategy in strategies.REGISTRY:
        for level in strategy.leaner_levels(plan[strategy.name], context.facts):
            lowered = strategy.lowered(level)
            helps = bool(lowered if activations else lowered - {Memory.ACTIVATIONS})
            if helps and context.allows(strategy.name, level):
                fallback = plan.replace(**{strategy.name: level})
                fallback = fallback.unsized if clash(fallback) else fallback
                if not clash(fallback):
                    yield fallback
