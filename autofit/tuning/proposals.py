"""Proposes the plan to measure next."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from autofit import strategies
from autofit.analysis.acquisition import Situation, choose
from autofit.analysis.fallback import FallbackContext, fallbacks_below
from autofit.analysis.feasibility import (
    LevelSet,
    level_sets_needed,
    level_sets_within,
    next_level_set,
)
from autofit.analysis.pruning import FRAGMENTED, dominated, fragmentation, waits_for_unsized
from autofit.analysis.ranking import ranked
from autofit.analysis.verdicts import best_plan, refused, tainted
from autofit.plan import Plan
from autofit.space.catalogue import Reason, Space, space
from autofit.space.order import by_cost
from autofit.space.static_memory import least_bytes
from autofit.storage import TrialRecord
from autofit.strategies import Facts, Hardware
from autofit.strategies.allocator import EXPANDABLE
from autofit.tuning.history import History
from autofit.tuning.notices import LevelsLeftOut
from autofit.tuning.reference import leading
from autofit.units import format_duration
from autofit.worker.records.trials import HORIZON, Verdict

REFINED = 3
"""Number of plans to which refining levels are added: the fastest that fit, or the leanest."""
MAX_SHORT = 5
"""Trials that may run out of memory before level sets are tried, if no plan fits.

Without this many, level sets are tried only if the computed static memory exceeds the budget."""


def within_reach(
    space: Space,
    finished: Sequence[TrialRecord],
    budget: int,
    horizon: int = HORIZON,
    *,
    holds: Callable[[Plan], bool] | None = None,
) -> tuple[Plan, ...]:
    """Return the plans that a search considers now, whether or not they were measured.

    These are the plans of the space, and the fastest fitting plans with one refining level added.
    While no plan fits, refining levels are added to the leanest plans that were tried.

    Args:
        space: The space of the search.
        finished: The finished trials.
        budget: Bytes of a device.
        horizon: Optimizer steps over which the time to compile is charged.
        holds: Whether the static memory of a plan may fit. Given if plans need a level set: then
            all plans contain the level set of one of the fastest fitting plans.
    """
    fitting = [trial.plan for trial in ranked(finished, budget, horizon)]
    short = [trial.plan for trial in finished if trial.verdict is Verdict.OUT_OF_MEMORY]
    bases = fitting or sorted(short, key=by_cost, reverse=True)
    refined = [each for base in bases[:REFINED] for each in space.refinements(base.searched)]
    level_sets = dict.fromkeys(LevelSet.of(base) for base in fitting[:REFINED])
    core = [p for each in level_sets for p in each.plans(space)] if holds else space.plans()
    return (*dict.fromkeys(filter(holds, (*core, *refined))),)


class Proposer:
    """Proposes one plan at a time, from the current state of the history."""

    def __init__(self, history: History, hardware: Hardware) -> None:
        self._history = history
        self._hardware = hardware
        self._left_out: tuple[Reason, ...] = ()

    def next(self, fixed: Plan | None = None, *, fresh: bool = False) -> Plan | None:
        """Return the plan to measure next; ``None`` if no plan is worth a trial now.

        Args:
            fixed: ``Plan.fixed`` of the launch that asks; ``None`` for a new launch.
            fresh: Whether the plan would be the first of the process that asks.
        """
        found = self._next(fixed, fresh=fresh)
        return self._history.optuna_study.ask(found) if isinstance(found, Situation) else found

    def known(self) -> tuple[Hashable, ...]:
        """Return the state on which proposals depend. Equal states give equal proposals."""
        study = self._history.study
        running = frozenset(trial.plan for trial in self._history.running())
        return len(self._history.finished()), running, study.facts, study.left_out

    def wants_launch(self) -> bool:
        """Return whether there is a plan to measure in a new launch."""
        found = self._next(None, fresh=False)
        return choose(found) is not None if isinstance(found, Situation) else found is not None

    def fallback(self) -> Plan | None:
        """Return the next fallback below the fastest plan; ``None`` if none is left.

        Fallbacks are needed if no plan fits in its confirmation run. If the heap was fragmented in
        that run, the first fallback is the same plan with expandable segments.
        """
        study, history, space = self._history.study, self._history, self._space()
        unused = (name for name, levels in space.levels if len(levels) == 1)
        context = FallbackContext(
            hardware=self._hardware,
            allow=history.options.allow,
            facts=study.facts or Facts(),
            trials=history.finished(),
            budget=study.budget,
            refused=frozenset(unused),
            left_out=frozenset((strategy, level) for strategy, level, _ in study.left_out),
        )
        if not (fitted := history.ranked_before_confirmation()):
            return None
        plan = best_plan(fitted[0])
        fallbacks = fallbacks_below(plan, context)
        runs = history.confirmations(plan)
        fragmented = any(fragmentation(trial) >= FRAGMENTED for trial in runs)
        if fragmented and EXPANDABLE in space.choices("allocator"):
            fallbacks.insert(0, plan.replace(allocator=EXPANDABLE))
        return next(
            (fallback for fallback in fallbacks if not history.confirmations(fallback)), None
        )

    def _next(self, fixed: Plan | None, *, fresh: bool) -> Plan | Situation | None:
        """Return the plan to measure next, or the situation from which to choose one."""
        history = self._history
        finished, running = history.finished(), {trial.plan for trial in history.running()}
        if self._limit_reached(len(finished) + len(running)):
            return None
        if fixed is None and self._reference_runs(running):
            return None
        if fixed is None and Plan() not in running.union(trial.plan for trial in finished):
            return Plan()
        space = self._space()
        level_sets = self._level_sets(space)
        history.require_baseline(reachable=bool(level_sets))
        level_set = self._next_level_set(level_sets, space, finished)
        if level_set is not None:
            return self._plan_of_level_set(level_set, space, running, fixed, fresh=fresh)
        if level_sets is not None and not history.ranked():
            return None
        found = self._situation(space, level_sets, running, fixed)
        core = [plan for plan in space.plans() if plan in found.candidates]
        if (first := self._leading(core)) is not None:
            here = fixed is None or (fresh and first.follows(fixed))
            return first if here and first not in running else None  # nothing before the reference
        if fixed is not None and not fresh:
            left = tuple(plan for plan in found.candidates if plan not in history.first_in_process)
            return replace(found, candidates=left)
        return found

    def _situation(
        self,
        space: Space,
        level_sets: tuple[LevelSet, ...] | None,
        running: set[Plan],
        fixed: Plan | None = None,
    ) -> Situation:
        """Return the situation from which to choose the next plan, beside those ``running``."""
        history = self._history
        finished, drifted = history.finished(), history.drifted()
        good = tuple(each for each in finished if not tainted(each.plan, drifted, finished))
        facts, budget, horizon = history.study.facts, history.study.budget, history.options.horizon
        known = running.union(trial.plan for trial in finished)
        holds = self._holds if level_sets is not None else None
        tried = within_reach(space, good, budget, horizon, holds=holds)
        ended = (*drifted, *refused(finished))
        untried = [p for p in tried if p not in known and not tainted(p, ended, finished)]
        batch = facts.batch if facts else None
        return Situation(
            candidates=tuple(plan for plan in untried if dominated(plan, good, batch) is None),
            waiting=tuple(plan for plan in untried if waits_for_unsized(plan, good)),
            finished=good,
            running=tuple(running),
            facts=facts,
            budget=budget,
            cuda=self._hardware.device == "cuda",
            horizon=horizon,
            fixed=fixed,
        )

    def nothing_worth_running(self) -> bool:
        """Return whether no plan would be started now, not even one that is running."""
        if self.reference_running() or not self._history.ranked():
            return False
        space = self._space()
        return choose(self._situation(space, self._level_sets(space), set())) is None

    def reference_running(self) -> bool:
        """Return whether the reference is running."""
        return self._reference_runs({trial.plan for trial in self._history.running()})

    def _level_sets(self, space: Space) -> tuple[LevelSet, ...] | None:
        """Return the level sets of which a plan needs one; ``None`` if no set is needed."""
        facts, budget = self._history.study.facts, self._history.study.budget
        if facts is None or self._history.baseline() is not Verdict.OUT_OF_MEMORY:
            return None
        return level_sets_needed(space, facts, budget, cuda=self._hardware.device == "cuda")

    def _holds(self, plan: Plan) -> bool:
        """Return whether the static memory under ``plan`` may fit the budget."""
        facts, cuda = self._history.study.facts or Facts(), self._hardware.device == "cuda"
        return least_bytes(plan, facts, cuda=cuda) <= self._history.study.budget

    def _next_level_set(
        self, level_sets: Sequence[LevelSet] | None, space: Space, finished: Sequence[TrialRecord]
    ) -> LevelSet | None:
        """Return the level set to try next; ``None`` if a plan fits or no set is left.

        Sets are tried if one is needed, or if ``MAX_SHORT`` trials ran out of memory.
        """
        if self._history.ranked():
            return None
        study, cuda = self._history.study, self._hardware.device == "cuda"
        short = sum(trial.verdict is Verdict.OUT_OF_MEMORY for trial in finished)
        if (
            level_sets is None
            and short >= MAX_SHORT
            and study.facts is not None
            and study.facts.roots
        ):
            level_sets = level_sets_within(space, study.facts, study.budget, cuda=cuda)
        return next_level_set(level_sets or (), space, finished)

    def _plan_of_level_set(
        self,
        level_set: LevelSet,
        space: Space,
        running: set[Plan],
        fixed: Plan | None,
        *,
        fresh: bool,
    ) -> Plan | None:
        """Return the plan that tests whether a level set is enough; ``None`` while another runs.

        If the set allows an exact plan, the reference comes first.
        """
        if fixed is None and running:
            return None
        known = {trial.plan for trial in self._history.finished()} | running
        ended = refused(self._history.finished())
        others = [
            plan
            for plan in level_set.plans(space)
            if plan not in known and not tainted(plan, ended, self._history.finished())
        ]
        leading = None if level_set.own_process else self._leading(others)
        plan = leading or level_set.leanest(space)
        if plan is None or plan in running:
            return None
        first = leading or plan in self._history.first_in_process
        if fixed is None:
            return plan
        here = plan.follows(fixed) and not level_set.own_process and (fresh or not first)
        return plan if here else None

    def _leading(self, candidates: Sequence[Plan]) -> Plan | None:
        """Return the plan to launch as the reference; ``None`` if no reference is missing."""
        history = self._history
        if history.reference.trace is not None or history.baseline() in (None, Verdict.MEASURED):
            return None
        return self._first(candidates, history.finished())

    def _first(self, candidates: Sequence[Plan], finished: Sequence[TrialRecord]) -> Plan | None:
        cuda = self._hardware.device == "cuda"
        return leading(candidates, finished, self._history.study.facts, cuda=cuda)

    def _reference_runs(self, running: set[Plan]) -> bool:
        """Return whether the neutral plan, or the plan chosen as the reference, is running."""
        exact = {plan for plan in running if self._first([plan], ())}
        return Plan() in running or bool(exact and self._leading([*exact]))

    def _space(self) -> Space:
        options, study = self._history.options, self._history.study
        found = space(
            self._hardware,
            study.facts or Facts(),
            allow=options.allow,
            only=options.only,
            without=options.without,
            refused=study.left_out,
        )
        if study.facts is not None and found.left_out != self._left_out:
            new = tuple(
                reason
                for reason in found.left_out
                if reason not in self._left_out and self._is_news(*reason[:2])
            )
            self._left_out = found.left_out
            if new:
                self._history.tell(LevelsLeftOut(reasons=new))
        return found

    def _is_news(self, strategy: str, level: str) -> bool:
        """Return whether to tell the user that a level is left out; ``--dry-run`` lists all."""
        selected = strategy in self._history.options.only
        return selected or not strategies.get(strategy).level(level).refines

    def tell_limit(self) -> None:
        """Say once which option has ended the search, if one has."""
        history, options, limit = self._history, self._history.options, ""
        if history.late() and options.timeout is not None:
            limit = f"--timeout {format_duration(options.timeout)}"
        elif self._limit_reached(len(history.finished())):
            limit = f"--trials {options.trials}"
        if limit:
            history.say_if_new(
                f"The search ended by {limit}. Plans that were not tried may be faster."
            )

    def _limit_reached(self, trials: int) -> bool:
        """Return whether ``--timeout`` or ``--trials`` ends the search."""
        most = self._history.options.trials
        return self._history.late() or (most is not None and trials >= most)
