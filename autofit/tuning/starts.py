"""The fixed starts of a search: plans that are tried whatever the sampler is.

The first is the script as it is. If that does not fit, the reference follows. Then come the fastest
plans of an earlier study of the same model. The weights, gradients and optimizer state alone may
exceed the budget. Then the leanest plan of each set of levels that lowers them is tried too. All
are enqueued in the Optuna study.
"""

from __future__ import annotations

from collections.abc import Sequence

from autofit.analysis.candidates import Launch, SearchState
from autofit.analysis.feasibility import LevelSet, level_sets_within, next_level_set
from autofit.analysis.verdicts import refused, tainted
from autofit.plan import Plan
from autofit.tuning.reference import leading, leaner_reference
from autofit.worker.records.trials import Verdict

MAX_SHORT = 5
"""Trials that may run out of memory before level sets are tried, if no plan fits.

Without this many, level sets are tried only if the computed static memory exceeds the budget."""


class FixedStarts:
    """The fixed starts that are due in one state of a search."""

    def __init__(
        self, state: SearchState, *, has_reference: bool, earlier: Sequence[Plan] = ()
    ) -> None:
        """``has_reference``: whether there is a trial to compare the others with.

        ``earlier``: the fastest plans of an earlier study of the same model.
        """
        self._state = state
        self._has_reference = has_reference
        self._earlier = earlier

    def due(self, launch: Launch | None) -> tuple[Plan | None, bool]:
        """Return the start for ``launch``, or for a new one; and whether others must wait.

        Others wait for a start that runs, or that needs another launch. They do not wait for a
        reference with a plan: it is slow, and the winner is compared with it when it is confirmed.
        """
        state = self._state
        if launch is None and Plan() in state.running:
            return None, True
        tried = state.running.union(trial.plan for trial in state.finished)
        if launch is None and Plan() not in tried:
            return Plan(), True
        level_set = self._next_level_set()
        if level_set is not None:
            return self._leanest(level_set, launch), True
        if state.level_sets is not None and not state.fits:
            return None, True
        first = self._reference()
        if first is None or first in state.running:
            return self._from_earlier(launch), False
        here = launch is None or (launch.fresh and _follows(first, launch))
        return (first if here else None), True

    def _from_earlier(self, launch: Launch | None) -> Plan | None:
        """Return the next plan of an earlier study; ``None`` if ``launch`` can measure none."""
        state = self._state
        tried = state.running.union(trial.plan for trial in state.finished)
        for plan in self._earlier:
            here = launch is None or launch.can_measure(plan, state.first_in_process)
            if plan not in tried and here and state.why_not(plan) is None:
                return plan
        return None

    @property
    def reference_runs(self) -> bool:
        """Whether the neutral plan, or the plan chosen as the reference, is running."""
        running = self._state.running
        exact = [plan for plan in running if self._first([plan], ended=False)]
        return Plan() in running or bool(
            exact and (self._leading(exact) or self._leaner() in running)
        )

    def _reference(self) -> Plan | None:
        """Return the plan to launch as the reference; ``None`` if no reference is missing."""
        candidates = set(self._state.situation().candidates)
        plans = [plan for plan in self._state.space.plans() if plan in candidates]
        return self._leading(plans) or self._leaner()

    @property
    def _reference_missing(self) -> bool:
        no_baseline = self._state.baseline in (None, Verdict.MEASURED)
        return not (self._has_reference or no_baseline)

    def _leading(self, candidates: Sequence[Plan]) -> Plan | None:
        return self._first(candidates, ended=True) if self._reference_missing else None

    def _leaner(self) -> Plan | None:
        state = self._state
        if not self._reference_missing:
            return None
        return leaner_reference(
            state.space, state.finished, state.facts, state.budget, cuda=state.cuda
        )

    def _first(self, candidates: Sequence[Plan], *, ended: bool) -> Plan | None:
        state = self._state
        return leading(candidates, state.finished if ended else (), state.facts, cuda=state.cuda)

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

    def _leanest(self, level_set: LevelSet, launch: Launch | None) -> Plan | None:
        """Return the plan that tests whether a level set is enough; ``None`` while another runs.

        If the set allows an exact plan, the reference comes first.
        """
        state = self._state
        if launch is None and state.running:
            return None
        known = state.running.union(trial.plan for trial in state.finished)
        ended = refused(state.finished)
        others = [
            plan
            for plan in level_set.plans(state.space)
            if plan not in known and not tainted(plan, ended, state.finished)
        ]
        first = None if level_set.own_process else self._leading(others)
        plan = first or level_set.leanest(state.space)
        if plan is None or plan in state.running:
            return None
        if launch is None:
            return plan
        alone = first is not None or plan.alone or plan in state.first_in_process
        here = _follows(plan, launch) and not level_set.own_process and (launch.fresh or not alone)
        return plan if here else None


def _follows(plan: Plan, launch: Launch) -> bool:
    return plan.follows(launch.fixed)
