"""``autofit fit``: does a script fit a GPU that is not here, and under which plan?

The script runs for two optimizer steps on a GPU that does not exist (``worker/harness/fake_gpu``).
What a plan would change is computed from the tensors of the second step, as ``autofit explain``
does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from autofit.exceptions import UsageError
from autofit.facts import Facts
from autofit.inspection.cards import FREE, GpuModel, model_named, models_named
from autofit.inspection.explanation import beside_tensors, sizes_by_kind
from autofit.inspection.launches import LaunchOutcome, Target, inspect
from autofit.inspection.options import FitOptions
from autofit.inspection.prediction import Predictor, device_bytes
from autofit.inspection.roofline import relative_time
from autofit.inspection.techniques import combinations
from autofit.plan import Plan
from autofit.space.static_memory import least_bytes
from autofit.worker.records.inspection import Guess, Inspected, Inspection, TensorKind
from autofit.worker.records.trials import Script

Say = Callable[[str], None]
INSPECTION = Inspection(steps=1)
"""The first step makes the optimizer's state, the second one is followed."""
FASTEST = 3
"""Plans that are likely the fastest, of each card."""
OTHER = "other card"
"""The name of a card of which only the memory is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingPlan:
    """A plan on one card."""

    plan: Plan
    peak: int
    """Bytes that the process would occupy on the device."""
    kinds: Mapping[str, int]
    """The peak by kind of memory."""
    margin: int
    """Bytes of the budget that stay free; below zero, it does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFit:
    """One card: whether the script fits it, and under which plan."""

    name: str
    budget: int
    """Bytes that the process may occupy: the card less 5 %, or what the user gave."""
    as_it_is: FittingPlan
    plan: FittingPlan | None
    """The least change with which it fits; ``None`` if no plan was found, or the script stopped."""
    fastest: tuple[Plan, ...]
    """Plans that fit, the one that is likely the fastest first: an order, not figures."""

    @property
    def fits(self) -> bool:
        """Whether a plan was found."""
        return self.plan is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Which cards a script fits."""

    script: Script
    facts: Facts
    inspected: Inspected
    cards: tuple[CardFit, ...]
    stopped: str
    """What ended the script before its second step, so that the figures are a lower bound and no
    plan is named; else empty."""

    @property
    def by_kind(self) -> dict[TensorKind, int]:
        """Bytes by kind at the peak of the script as it is."""
        return sizes_by_kind((*self.inspected.moments[0].parts, *beside_tensors(self.inspected)))

    @property
    def guesses(self) -> tuple[Guess, ...]:
        """The numbers that were not known, the most frequent first."""
        return self.inspected.guesses

    @property
    def fits(self) -> bool:
        """Whether a plan was found for every card."""
        return all(card.fits for card in self.cards)


def fitting(options: FitOptions, say: Say = lambda line: None) -> Fit:
    """Run a script on a GPU that does not exist, and return which cards it fits.

    Raises:
        UsageError: A card is not known, or the script trains on the CPU.
        ScriptError: The script fails before it holds any tensor on the GPU.
        WorkerError: The process could not be started, or took too long.
    """
    models = models_named(options.gpu)
    if options.memory is not None and options.gpu is None:
        models = (model_named("H100"),)
    say(f"running {options.script.target} for two steps without a GPU")
    largest = max(models, key=lambda each: (each.capability, each.memory))
    outcome = inspect(Target.on(options.script, gpu=largest.name), Plan(), INSPECTION)
    inspected = outcome.inspected
    if inspected is None or not inspected.moments[0].of(
        TensorKind.WEIGHTS, TensorKind.OTHER, TensorKind.TEMPORARY
    ):
        raise UsageError(
            f"{options.script.target} puts nothing on a GPU: give the arguments with which it does"
        )
    found = _Plans(outcome, inspected)
    return Fit(
        script=options.script,
        facts=outcome.facts,
        inspected=inspected,
        cards=tuple(found.on(model, options) for model in models),
        stopped=found.stopped,
    )


class _Plans:
    """Predicts what plans need, each of them once."""

    def __init__(self, outcome: LaunchOutcome, inspected: Inspected) -> None:
        self._facts = outcome.facts
        self._inspected = inspected
        timeline = inspected.timeline
        self._predictor = Predictor(timeline, outcome.facts) if timeline is not None else None
        self._known: dict[Plan, dict[str, int]] = {}
        self.stopped = outcome.stopped if timeline is None else ""

    def on(self, model: GpuModel, options: FitOptions) -> CardFit:
        """Return how the script fits a card."""
        size = model.hardware.total_bytes
        budget = int(FREE * size) if options.memory is None else options.memory
        name = OTHER if options.gpu is None and options.memory is not None else model.name
        as_it_is = self._plan(Plan(), budget)
        fastest: list[Plan] = []
        least = None
        if self._predictor is not None:
            least = as_it_is if as_it_is.margin >= 0 else None
            plans = [
                plan
                for plan in combinations(self._facts, model.hardware)
                if least_bytes(plan, self._facts, cuda=True) <= budget
            ]
            times = {plan: self._time(plan, model) for plan in (Plan(), *plans)}
            if least is None:
                ordered = sorted(plans, key=lambda plan: (len(plan.changes), times[plan]))
                tried = (self._plan(plan, budget) for plan in ordered)
                least = next((each for each in tried if each.margin >= 0), None)
            if least is not None:
                ordered = sorted(times, key=lambda plan: (times[plan], len(plan.changes)))
                fits = (plan for plan in ordered if self._plan(plan, budget).margin >= 0)
                fastest = list(islice(fits, FASTEST))
        return CardFit(
            name=name, budget=budget, as_it_is=as_it_is, plan=least, fastest=tuple(fastest)
        )

    def _time(self, plan: Plan, model: GpuModel) -> float:
        work = self._inspected.work
        assert work is not None, "a fake GPU counts it"
        return relative_time(plan, work, model, self._facts)

    def _plan(self, plan: Plan, budget: int) -> FittingPlan:
        if plan not in self._known:
            self._known[plan] = self._kinds(plan)
        kinds = self._known[plan]
        peak = sum(kinds.values())
        return FittingPlan(plan=plan, peak=peak, kinds=kinds, margin=budget - peak)

    def _kinds(self, plan: Plan) -> dict[str, int]:
        """Return the bytes that a plan needs on the device, by kind."""
        inspected = self._inspected
        if plan.neutral or self._predictor is None:
            parts = (*inspected.moments[0].parts, *beside_tensors(inspected))
            return {str(kind): size for kind, size in sizes_by_kind(parts).items()}
        kinds = self._predictor.kinds(plan)
        plain = inspected.plain
        assert plain is not None, "a fake GPU has them"
        tensors = sum(kinds.values())
        context = plain.device - plain.reserved
        whole = device_bytes(
            tensors,
            allocated=plain.allocated,
            reserved=plain.reserved,
            context=context,
            cuda=True,
        )
        cache = round(whole) - tensors - context
        return kinds | {str(TensorKind.CACHE): cache, str(TensorKind.CONTEXT): context}
