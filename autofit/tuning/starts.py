"""The fixed starts of a search: plans that are tried whatever the sampler is.

The first is the script as it is, which is observed. What an expert would try follows: mixed
precision, a fused optimizer, and as little checkpointing as fits; then the same compiled. Then come
the fastest plans of an earlier study of the same model. The weights, gradients and optimizer state
alone may exceed the budget. Then the leanest plan of each set of levels that lowers them is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

from autofit import strategies
from autofit.analysis.acquisition import PAYBACK
from autofit.analysis.candidates import AskingLaunch, SearchSnapshot
from autofit.analysis.feasibility import LevelSet, level_sets_within, next_level_set
from autofit.analysis.frontier import frontier
from autofit.analysis.ranking import ranked
from autofit.plan import Plan
from autofit.space.order import expected
from autofit.storage import Store, StudyRecord
from autofit.strategies import AS_IS, AUTO, Facts, Memory, Number
from autofit.worker.records.trials import Verdict

MAX_SHORT = 5
"""Trials that may run out of memory before level sets are tried, if no plan fits.

Without this many, level sets are tried only if the computed static memory exceeds the budget."""
HALF = 0.5
"""Share of the activations that a refining level may leave to be part of the expert's plan."""


class FixedStarts:
    """The fixed starts that are due in one state of a search."""

    def __init__(self, state: SearchSnapshot, *, earlier: Sequence[Plan] = ()) -> None:
        """``earlier``: the fastest plans of an earlier study of the same model."""
        self._state = state
        self._earlier = earlier
        self._tried = state.running.union(trial.plan for trial in state.finished)

    @property
    def script_runs(self) -> bool:
        """Whether the script runs as it is."""
        return Plan() in self._state.running

    def due(self, launch: AskingLaunch | None) -> tuple[Plan | None, bool]:
        """Return the start for ``launch``, or for a new one; and whether others must wait.

        Others wait for the script as it is, and while no set of levels is known that fits.
        """
        state = self._state
        if launch is None and self.script_runs:
            return None, True
        if launch is None and Plan() not in self._tried:
            return Plan(), True
        level_set = self._next_level_set()
        if level_set is not None:
            return self._leanest(level_set, launch), True
        if state.level_sets is not None and not state.fits:
            return None, True
        for plan in (self._expert(), self._compiled(), *self._earlier):
            if plan is None or plan in self._tried or state.why_not(plan) is not None:
                continue
            if launch is None or launch.can_measure(plan):
                return plan, False
        return None, False

    def _expert(self) -> Plan | None:
        """Return the plan that is expected to be fastest, of those that need no own process.

        It leaves open how many blocks are checkpointed, and how the batch is split. A plan that is
        made for one batch size comes later. Of refining levels it has at most one that saves much.
        """
        state = self._state
        plans = [
            plan
            for plan in state.situation().candidates
            if plan.fixed.neutral
            and plan.unsized == plan
            and not plan.alone
            and not any(s.level(level).refines for s, level in plan)
        ]
        ran = (t for t in state.finished if t.verdict is not Verdict.REFUSED)
        if state.facts is None or not plans or any(not trial.plan.neutral for trial in ran):
            return None

        def order(plan: Plan) -> tuple[float, bool]:
            plain = plan.with_number(Number.BLOCKS, AS_IS)  # its trial may take no block at all
            return expected(plain, state.facts), plan.blocks != AUTO

        best = min(plans, key=order)
        return next(filter(self._saves_much, state.space.refinements(best)), best)

    def _saves_much(self, plan: Plan) -> bool:
        """Return whether its refining level should halve the activations and cost no time."""
        facts = self._state.facts or Facts()
        return all(
            Memory.ACTIVATIONS in s.lowered(level)
            and s.expected_slowdown(level, facts) <= 1.0
            and s.expected_share(level, facts) <= HALF
            for s, level in plan
            if s.level(level).refines
        )

    def _compiled(self) -> Plan | None:
        """Return the fastest plan so far, compiled, if compiling may pay within the horizon."""
        state = self._state
        best = next(iter(ranked(state.finished, state.budget, state.horizon)), None)
        if best is None or best.measurement is None or state.facts is None or best.plan.neutral:
            return None
        if state.spreads_later:  # the plan that spans all devices is compiled
            return None
        if best.plan.compiles:
            return None
        step, facts = best.measurement.seconds, state.facts
        levels = [
            (strategy.expected_setup(level, facts), strategy, level)
            for strategy in strategies.REGISTRY
            for level in state.space.choices(strategy.name)
            if strategy.level(level).setup_seconds and not strategy.level(level).refines
        ]
        for setup, strategy, level in sorted(levels, key=lambda each: each[0]):
            saved = (1.0 - strategy.expected_slowdown(level, facts)) * step * state.horizon
            if saved >= PAYBACK * setup:
                return best.plan.searched.replace(**{strategy.name: level})
        return None

    def _next_level_set(self) -> LevelSet | None:
        """Return the level set to try next; ``None`` if a plan fits or no set is left.

        Sets are tried if one is needed, or if ``MAX_SHORT`` trials ran out of memory.
        """
        state, level_sets = self._state, self._state.level_sets
        if state.fits:
            return None
        short = sum(trial.verdict is Verdict.OUT_OF_MEMORY for trial in state.finished)
        facts = state.facts
        if level_sets is None and short >= MAX_SHORT and facts is not None and facts.roots:
            level_sets = level_sets_within(state.space, facts, state.budget, cuda=state.cuda)
        return next_level_set(level_sets or (), state.space, state.finished)

    def _leanest(self, level_set: LevelSet, launch: AskingLaunch | None) -> Plan | None:
        """Return the plan that tests whether a level set is enough; ``None`` while another runs."""
        state = self._state
        if launch is None and state.running:
            return None
        plan = level_set.leanest(state.space)
        if plan is None or plan in state.running:
            return None
        if launch is None:
            return plan
        follows = plan.follows(launch.fixed) and not level_set.own_process
        return plan if follows and (launch.fresh or not plan.alone) else None


def known_plans(store: Store, study: StudyRecord) -> tuple[StudyRecord, tuple[Plan, ...]] | None:
    """Return the newest earlier study of the model and its fastest plans; ``None`` without one.

    It may have had another budget, another version of the script, or another user.

    The first plan is the fastest of all, if a trial can fit its numbers to the budget of ``study``.
    The last one is the fastest that fitted that budget. The model of ``study`` has to be known.
    Both studies have the same GPU model.
    """
    if study.facts is None or not study.facts.roots:
        return None
    for other in store.studies():
        facts, same = other.facts, other.hardware.name == study.hardware.name
        if other.id == study.id or facts is None or not same:
            continue
        if _model(facts) == _model(study.facts) and (plans := _plans(store, other, study.budget)):
            return other, plans
    return None


def _plans(store: Store, study: StudyRecord, budget: int) -> tuple[Plan, ...]:
    points = [each for each in frontier(store, study) if not each.plan.neutral]
    first = [each.plan.searched for each in points[:1] if each.plan.searched.open]
    fitted = (e.plan.searched for e in points if e.measurement.peak_device <= budget)
    return tuple(dict.fromkeys([*first, *itertools.islice(fitted, 1)]))


def _model(facts: Facts) -> tuple[Hashable, ...]:
    """Return what two studies of one model have in common."""
    roots = tuple((each.name, each.parameters, each.trainable, each.blocks) for each in facts.roots)
    return facts.framework, *roots
