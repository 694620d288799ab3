"""What each technique would free in this script, and what it costs: measured or predicted."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from autofit import strategies
from autofit.facts import Facts, Hardware
from autofit.inspection.prediction import Predictor, predictable
from autofit.plan import Plan
from autofit.space.catalogue import clash
from autofit.space.order import expected
from autofit.storage import State, Store, script_path
from autofit.storage.records import StudyKey
from autofit.strategies import Fidelity, Number, Strategy
from autofit.strategies.support.block_levels import most_blocks
from autofit.worker.records.inspection import Timeline
from autofit.worker.records.trials import Measurement, Script

LEAST = 0.005
"""Share of the peak that a technique must free to be named."""
MOST_LEVELS = 4
"""Most techniques in a plan that is suggested for a card."""


class Basis(StrEnum):
    """Where the figures of a technique come from."""

    MEASURED = "measured"
    """A trial of a search."""
    PREDICTED = "predicted"
    """The tensors of this script, followed through one step."""
    ESTIMATED = "estimated"
    """Also measurements of other scripts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """One technique: what it frees and costs."""

    plan: Plan
    freed: int
    """Bytes of tensors at the peak."""
    peak: int
    """Bytes of tensors at the peak that remains."""
    slowdown: float | None
    """Step time relative to the script as it is; ``None`` on a CPU that has not measured it."""
    fidelity: Fidelity
    """What it may change in the training."""
    basis: Basis
    predicted_freed: int
    """The prediction, also if it was measured since."""


Measured = Mapping[Plan, Measurement]
"""Measurements by plan, that of the neutral plan among them if it fits."""


def techniques(
    timeline: Timeline, facts: Facts, hardware: Hardware, measured: Measured
) -> tuple[Technique, ...]:
    """Return the techniques that free memory, those that free most first.

    ``timeline``: a step of the script as it is.
    """
    predictor = Predictor(timeline, facts)
    as_it_is = predictor.peak(Plan())
    found = [
        _technique(plan, predictor, facts, measured, as_it_is, cuda=not hardware.on_host)
        for plan in single_plans(facts, hardware)
        if predictor.applies(plan)
    ]
    useful = [each for each in found if each.freed > LEAST * as_it_is]
    return tuple(sorted(useful, key=lambda each: -each.freed))


def _technique(
    plan: Plan,
    predictor: Predictor,
    facts: Facts,
    measured: Measured,
    as_it_is: float,
    *,
    cuda: bool,
) -> Technique:
    """``cuda``: whether it is a GPU, of which the priors of step times come."""
    predicted = int(as_it_is - predictor.peak(plan))
    neutral, own = measured.get(Plan()), measured.get(plan)
    slowdown: float | None = expected(plan, facts) if cuda else None
    freed = predicted
    basis = Basis.PREDICTED if predictable(plan, facts, cuda=cuda) else Basis.ESTIMATED
    if neutral is not None and own is not None:
        freed = neutral.peak_allocated - own.peak_allocated
        slowdown = neutral.samples_per_second / own.samples_per_second
        basis = Basis.MEASURED
    return Technique(
        plan=plan,
        freed=freed,
        peak=int(as_it_is) - freed,
        slowdown=slowdown,
        fidelity=plan.fidelity(facts),
        basis=basis,
        predicted_freed=predicted,
    )


def single_plans(facts: Facts, hardware: Hardware) -> Iterator[Plan]:
    """Yield the plans with one technique that this script and this hardware allow."""
    for strategy in strategies.REGISTRY:
        if strategy.number is Number.RANKS or any(each.shards for each in strategy.levels):
            continue
        for level in _levels(strategy, strategy.offered(hardware, facts), facts):
            reason = strategy.unavailable(level, hardware) or strategy.inapplicable(level, facts)
            plan = Plan.of({strategy.name: level})
            if reason is None and not plan.open and not clash(plan):
                yield plan


def _levels(strategy: Strategy, offered: Sequence[str], facts: Facts) -> Sequence[str]:
    """Return levels with numbers in place of ``auto``."""
    if strategy.number is Number.SAMPLES:
        batch = facts.batch or 1
        return [str(size) for size in dict.fromkeys((batch // 2, 1)) if 0 < size < batch]
    if strategy.number is Number.BLOCKS and (blocks := most_blocks(facts)) > 1:
        return [str(blocks // 2), *offered]
    return offered


def combinations(singles: Iterable[Plan], facts: Facts) -> Iterator[Plan]:
    """Yield plans of up to ``MOST_LEVELS`` techniques that change no more than rounding.

    ``singles``: plans with one technique.
    """
    singles = [
        plan
        for plan in singles
        if plan.fidelity(facts) <= Fidelity.ROUNDING
        and any(strategy.lowered(level) and not strategy.sized for strategy, level in plan)
    ]
    for number in range(1, MOST_LEVELS + 1):
        for chosen in itertools.combinations(singles, number):
            levels = dict(change for plan in chosen for change in plan.changes)
            plan = Plan.of(levels)
            if len(plan.changes) == number and not clash(plan):
                yield plan


def stored(store: Store, script: Script, hardware: Hardware) -> Measured:
    """Return the measurements of this script, as it is now, on one device of this kind.

    The arguments and the text of the script must be the same. Newer measurements count.
    """
    own = StudyKey.of(script, gpu=hardware.name, gpus=1, memory=None, allow="")
    found: dict[Plan, Measurement] = {}
    for study in sorted(store.studies(script_path(script)), key=lambda each: each.opened):
        key = study.key
        if (key.digest, key.args, key.gpu, key.gpus) != (own.digest, own.args, own.gpu, own.gpus):
            continue
        for trial in store.trials(study, state=State.FINISHED):
            for each in trial.report.measurements if trial.report else ():
                if not (plan := each.plan(trial.plan)).open:
                    found[plan.whole(study.facts or Facts())] = each
    return found
