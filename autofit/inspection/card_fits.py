"""Which cards a script fits, and under which plan, from the tensors of one step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from autofit.facts import Facts
from autofit.inspection.cards import FREE, GpuModel
from autofit.inspection.launches import LaunchOutcome
from autofit.inspection.prediction import Predictor, beside_bytes
from autofit.inspection.techniques import combinations, single_plans
from autofit.plan import Plan
from autofit.space.order import expected
from autofit.space.static_memory import chunk_samples, least_bytes
from autofit.worker.records.inspection import Part, TensorKind, Work

FASTEST = 3
"""Plans that are likely the fastest, of each card."""
HALF = "half"
LAUNCH = 25e-6
"""Seconds in which Python code launches an operation: 58 of them in the 1.5 ms of a block that
``autofit/analysis/priors.py`` assumes."""
ATTAINED = 0.6
"""Share of the data sheet's rates that large products attain, and of its bandwidth."""
TRAFFIC = 0.65
"""Share of the bytes that operations move where products compute in 16 bits: norms, losses and the
optimizer stay in float32."""


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
    size: int
    """Bytes of its memory."""
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

    @property
    def advised(self) -> Plan | None:
        """The script as it is if it fits; if not, the plan that is likely the fastest."""
        if self.as_it_is.margin >= 0:
            return Plan()
        return self.fastest[0] if self.fastest else None


class CardFits:
    """Predicts what plans need from one outcome of the script as it is, each plan once."""

    def __init__(self, outcome: LaunchOutcome, *, cuda: bool) -> None:
        """``cuda``: whether the script was followed on a GPU, be it a fake one."""
        assert outcome.inspected is not None, "memory was followed"
        self._facts = outcome.facts
        self._inspected = outcome.inspected
        self._plain = outcome.inspected.plain if cuda else None
        timeline = outcome.inspected.timeline
        self._predictor = Predictor(timeline, outcome.facts) if timeline is not None else None
        self._known: dict[Plan, dict[str, int]] = {}
        self._least: dict[tuple[Plan, ...], dict[Plan, float]] = {}

    def on(self, model: GpuModel, budget: int | None = None) -> CardFit:
        """Return how the script fits a card. ``budget``: bytes, by default the card's less 5 %."""
        size = model.hardware.total_bytes
        if budget is None:
            budget = int(FREE * size)
        as_it_is = self._plan(Plan(), budget)
        least = as_it_is if as_it_is.margin >= 0 else None
        fastest: list[Plan] = []
        if self._predictor is None:
            least = None
        else:
            allowed = self._plans(model, self._predictor)
            plans = [plan for plan, least_size in allowed.items() if least_size <= budget]
            times = {plan: self._time(plan, model) for plan in (Plan(), *plans)}
            if least is None:
                ordered = sorted(plans, key=lambda plan: (len(plan.changes), times[plan]))
                least = next(self._fitting(ordered, budget), None)
            if least is not None:
                ordered = sorted(times, key=lambda plan: (times[plan], len(plan.changes)))
                found = islice(self._fitting(ordered, budget), FASTEST)
                fastest = [each.plan for each in found]
        return CardFit(
            name=model.name,
            size=size,
            budget=budget,
            as_it_is=as_it_is,
            plan=least,
            fastest=tuple(fastest),
        )

    def _plans(self, model: GpuModel, predictor: Predictor) -> dict[Plan, float]:
        """Return the plans that a card allows, and the least bytes that each needs.

        Cards of the same kind allow the same.
        """
        singles = tuple(single_plans(self._facts, model.hardware))
        if singles not in self._least:
            applying = filter(predictor.applies, singles)
            self._least[singles] = {
                plan: least_bytes(plan, self._facts, cuda=True)
                for plan in combinations(applying, self._facts)
            }
        return self._least[singles]

    def _fitting(self, plans: Iterable[Plan], budget: int) -> Iterator[FittingPlan]:
        return (found for plan in plans if (found := self._plan(plan, budget)).margin >= 0)

    def _time(self, plan: Plan, model: GpuModel) -> float:
        """Return a figure that is larger for slower plans: a roofline where the work is known."""
        work = self._inspected.work
        if work is None:
            return expected(plan, self._facts)
        return relative_time(plan, work, model, self._facts)

    def _plan(self, plan: Plan, budget: int) -> FittingPlan:
        if plan not in self._known:
            self._known[plan] = self._kinds(plan)
        kinds = self._known[plan]
        peak = sum(kinds.values())
        return FittingPlan(plan=plan, peak=peak, kinds=kinds, margin=budget - peak)

    def _kinds(self, plan: Plan) -> dict[str, int]:
        """Return the bytes that a plan needs on the device, by kind."""
        if plan.neutral or self._predictor is None:
            parts = self._inspected.moments[0].parts
            kinds = {str(kind): size for kind, size in sizes_by_kind(parts).items()}
        else:
            kinds = self._predictor.kinds(plan)
        return kinds | beside_bytes(sum(kinds.values()), self._plain)


def sizes_by_kind(parts: Iterable[Part]) -> dict[TensorKind, int]:
    """Return the bytes of parts by kind, in the order of ``TensorKind``."""
    sizes = dict.fromkeys(TensorKind, 0)
    for part in parts:
        sizes[part.kind] += part.size
    return {kind: size for kind, size in sizes.items() if size}


def relative_time(plan: Plan, work: Work, model: GpuModel, facts: Facts) -> float:
    """Return a figure that is larger for slower plans, near the seconds of a step: a roofline.

    It gives an order of plans, not times. A step lasts as long as the GPU computes, or as long as
    its kernels are launched, chunk by chunk. Effects beside precision and chunks are the priors of
    each level.
    """
    computes = next((level.products for s, name in plan if (level := s.level(name)).products), "")
    rates = {"": model.float32, "tf32": model.tf32, HALF: model.half}
    products = work.products / rates[computes] + work.half_products / model.half
    traffic = work.traffic * (TRAFFIC if computes == HALF else 1.0)
    gpu = (products / 1e12 + traffic / (model.bandwidth * 1e9)) / ATTAINED
    host = work.launches * LAUNCH
    for strategy, name in plan:
        level = strategy.level(name)
        if not level.products and not strategy.sized:
            slowdown = strategy.expected_slowdown(name, facts)
            gpu *= slowdown
            host *= slowdown if level.launches is None else level.launches
    samples, batch = chunk_samples(plan, facts), facts.batch
    chunks = math.ceil(batch / samples) if batch and samples else 1
    return max(gpu, chunks * host)
