"""Where a real run goes when it has died for want of memory: one rung leaner, the same training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from autofit import strategies
from autofit.ladder import ORDERED, lower
from autofit.plan import Plan
from autofit.results import ranked
from autofit.space import clash
from autofit.storage import TrialRecord
from autofit.strategies import AS_IS, Facts, Fidelity, Hardware

LESS = 0.95
"""A measured plan is a rung only where its peak was below this share of the present plan's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What the next rung is chosen from."""

    hardware: Hardware
    allow: Fidelity
    facts: Facts = field(default_factory=Facts)
    """Of the script, as far as known."""
    trials: Sequence[TrialRecord] = ()
    """Of the study the plan comes from; none where the plan was given."""
    budget: int = 0
    """Bytes the study searched within."""

    def allows(self, name: str, level: str) -> bool:
        """Return whether a level may stand in a rung: here, on this script, as far as allowed."""
        strategy = strategies.get(name)
        return (
            strategy.fidelity(level, self.facts) <= self.allow
            and strategy.unavailable(level, self.hardware) is None
            and strategy.inapplicable(level, self.facts) is None
        )


def next_rung(
    plan: Plan, ground: Ground, tried: Iterable[Plan] = (), *, activations: bool = True
) -> Plan | None:
    """Return the plan to go on with after ``plan`` ran out of memory; ``None`` at the last.

    What the search has measured comes first, the fastest that needed less; then what it has not:
    half the samples at a time, and the next level of what trades speed for activations. Not those
    where it is not ``activations`` that do not fit: the weights, the optimizer's state.
    """
    seen = {plan, *tried}
    rungs = (*_measured(plan, ground), *(_derived(plan, ground) if activations else ()))
    return next((rung for rung in rungs if rung not in seen), None)


def rungs_below(
    plan: Plan, ground: Ground, tried: Iterable[Plan] = (), *, activations: bool = True
) -> list[Plan]:
    """Return every rung below ``plan``, the next one first, as ``next_rung`` gives them."""
    seen, found = {plan, *tried}, list[Plan]()
    while (rung := next_rung(plan, ground, seen, activations=activations)) is not None:
        seen.add(rung)
        found.append(rung)
        plan = rung
    return found


def _measured(plan: Plan, ground: Ground) -> Iterator[Plan]:
    plans = {
        trial.report.best or trial.plan: trial.measurement.peak_device
        for trial in ranked(ground.trials, ground.budget)
        if trial.report is not None and trial.measurement is not None
    }
    if plan in plans:
        yield from (each for each, peak in plans.items() if peak < LESS * plans[plan])


def _derived(plan: Plan, ground: Ground) -> Iterator[Plan]:
    split = strategies.get("micro_batch")
    size = ground.facts.batch if plan["micro_batch"] == AS_IS else int(plan["micro_batch"])
    if size is not None and size > 1 and ground.allows("micro_batch", str(size // 2)):
        yield plan.replace(**{split.name: str(-(-size // 2))})
    for name in ORDERED:
        for level in lower(name, plan[name]):
            if ground.allows(name, level):
                rung = plan.replace(**{name: level})
                yield rung.unsized if clash(rung) else rung
