"""The plans that may be measured next, given everything that a search has found so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autofit import strategies
from autofit.analysis.feasibility import LevelSet, level_sets_needed
from autofit.analysis.pruning import dominated, waits_for_unsized
from autofit.analysis.ranking import ranked
from autofit.analysis.verdicts import refused, tainted
from autofit.facts import Bandwidth
from autofit.plan import Plan
from autofit.space.catalogue import Space, clash
from autofit.space.order import by_cost
from autofit.space.static_memory import least_bytes
from autofit.storage import TrialRecord
from autofit.strategies import Facts
from autofit.worker.records.trials import HORIZON, TrialReport, Verdict

REFINED = 3
"""Number of plans to which refining levels are added: the fastest that fit, or the leanest."""


@dataclass(frozen=True, slots=True)
class AskingLaunch:
    """The launch that asks for a plan."""

    fixed: Plan = field(default_factory=Plan)
    """Levels that its next plan must have (``Plan.follows``)."""
    fresh: bool = False
    """Whether the plan would be the first that runs in its process."""

    def can_measure(self, plan: Plan) -> bool:
        """Return whether the launch can measure ``plan``."""
        return plan.follows(self.fixed) and (self.fresh or not plan.alone)


@dataclass(frozen=True, kw_only=True)
class SearchSnapshot:
    """Everything on which the choice of the next plan depends."""

    space: Space
    finished: tuple[TrialRecord, ...]
    """The search's finished trials, each corrected by its confirmation run."""
    running: frozenset[Plan] = frozenset()
    drifted: tuple[TrialReport, ...] = ()
    """Reports of the confirmation runs that drifted."""
    facts: Facts | None
    budget: int
    """Bytes of a device."""
    cuda: bool
    horizon: int = HORIZON
    """Optimizer steps over which the time to compile is charged."""
    seconds_left: float | None = None
    """Seconds until ``--timeout`` ends the search; ``None`` without it."""
    link: str = ""
    """As in ``Hardware``."""
    bandwidth: Bandwidth | None = None
    """Between the ranks of a plan, as measured on this machine; ``None`` if it was not."""
    spreads_later: bool = False
    """Whether the plans run on one device each, and the search will spread them over several."""

    @cached_property
    def baseline(self) -> Verdict | None:
        """The verdict of the neutral plan, if it has one."""
        return next((trial.verdict for trial in self.finished if trial.plan.neutral), None)

    @cached_property
    def fits(self) -> bool:
        """Whether a plan fits."""
        return bool(ranked(self.finished, self.budget, self.horizon))

    @cached_property
    def level_sets(self) -> tuple[LevelSet, ...] | None:
        """The level sets of which a plan needs one; ``None`` if no set is needed."""
        if self.facts is None or self.baseline is not Verdict.OUT_OF_MEMORY:
            return None
        return level_sets_needed(self.space, self.facts, self.budget, cuda=self.cuda)

    def situation(self, launch: AskingLaunch | None = None) -> Situation:
        """Return the situation from which to choose a plan for ``launch``, or for a new launch."""
        finished, drifted = self.finished, self.drifted
        good = tuple(each for each in finished if not tainted(each.plan, drifted, finished))
        known = self.running.union(trial.plan for trial in finished)
        holds = self._holds if self.level_sets is not None else None
        tried = within_reach(self.space, good, self.budget, self.horizon, holds=holds)
        ended = (*drifted, *refused(finished))
        untried = [p for p in tried if p not in known and not tainted(p, ended, finished)]
        batch = self.facts.batch if self.facts else None
        candidates = (plan for plan in untried if dominated(plan, good, batch) is None)
        if launch is not None and not launch.fresh:
            candidates = (plan for plan in candidates if not plan.alone)
        return Situation(
            state=self,
            candidates=tuple(candidates),
            waiting=tuple(plan for plan in untried if waits_for_unsized(plan, good)),
            finished=good,
            fixed=launch.fixed if launch is not None else None,
        )

    def why_not(self, plan: Plan) -> str | None:
        """Return why a plan cannot be measured, whoever proposes it; ``None`` if it can."""
        levels = dict(self.space.levels)
        for name, level in plan.searched.changes:
            if level not in levels[name]:
                return f"{name} {level} is left out"
        if plan.ranks != self.space.ranks:
            return f"now each training has {self.space.ranks} ranks"
        ended = (*self.drifted, *refused(self.finished))
        if tainted(plan, ended, self.finished):
            return "another plan with these levels was refused"
        return clash(plan)

    def _holds(self, plan: Plan) -> bool:
        """Return whether the static memory under ``plan`` may fit the budget."""
        return least_bytes(plan, self.facts or Facts(), cuda=self.cuda) <= self.budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The plans among which a launch may choose, and the trials from which it judges them."""

    state: SearchSnapshot
    candidates: tuple[Plan, ...]
    """Plans that may be measured now."""
    waiting: tuple[Plan, ...] = ()
    """Plans that may be measured only after their ``unsized`` plan.

    Their expected speed counts for the ``unsized`` plan."""
    finished: tuple[TrialRecord, ...]
    """The finished trials that rule out no level."""
    fixed: Plan | None = None
    """Fixed levels of the launch that asks for a plan (``Plan.follows``).

    ``None`` for a new launch."""
    expectations: Mapping[tuple[str, str], tuple[float, float]] | None = None
    """Other priors for the cost model: see ``CostModel``."""


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
    While no plan fits, refining levels are added to the leanest plans that were tried. If only
    plans with refining levels fit, all plans of the space are considered with these levels too.

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
    if fitting and not holds and not any(base.searched in core for base in fitting):
        levels = (base.searched.changes for base in fitting[:REFINED])
        needed = dict.fromkeys(
            tuple((s, level) for s, level in changes if strategies.get(s).level(level).refines)
            for changes in levels
        )
        core = (*core, *(plan for each in needed for plan in space.plans(dict(each))))
    return (*dict.fromkeys(filter(holds, (*core, *refined))),)
