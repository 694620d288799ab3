"""Sets of levels under which weights, gradients and optimizer state fit the budget.

The static memory of a script is what it holds at any batch size: weights, gradients and optimizer
state. Arithmetic tells whether one level lowers it enough, without a launch. If
the static memory exceeds the budget under every plan of the usual space, the search needs a set of
levels that lowers it together. The search tries each set with the plan that needs the least memory
for activations. All further plans contain a set that was measured to fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autofit import strategies
from autofit.analysis.pruning import FRAGMENTED, fragmentation
from autofit.plan import Plan
from autofit.space.catalogue import Space, clash
from autofit.space.order import by_activations, by_change
from autofit.space.static_memory import KINDS, expected_bytes, least_bytes
from autofit.storage import TrialRecord
from autofit.strategies import AS_IS, AUTO, SPLIT, Facts, Waste
from autofit.worker.records.trials import Verdict

MIN_EXTRA = 0.05
"""After a set ran out of memory, the next must leave this share of the budget more free."""
MAX_SHORT = 2
"""Sets that may run out of memory before the search turns to those that leave the most free."""
STATIC_STRATEGIES = tuple(
    strategy.name
    for strategy in strategies.REGISTRY
    if any(
        strategy.keeps(each.name, kind, {}) < 1 for each in strategy.levels[1:] for kind in KINDS
    )
)
"""Names of the strategies that lower static memory."""


@dataclass(frozen=True, slots=True)
class LevelSet:
    """A set of levels under which the static memory fits the budget."""

    levels: tuple[tuple[str, str], ...]
    """A level for each of ``STATIC_STRATEGIES``, and whether the batch is split."""
    free_bytes: float
    """Expected bytes left for activations. Zero or less if the set may not fit."""
    own_process: bool = False
    """Whether to try the set in a process of its own, with expandable segments if available."""

    @classmethod
    def of(cls, plan: Plan) -> LevelSet:
        """Return the level set that a plan contains. Its ``free_bytes`` is 0, for unknown."""
        split = AUTO if plan.splits else AS_IS
        return cls((*((name, plan[name]) for name in STATIC_STRATEGIES), (SPLIT, split)), 0.0)

    def plans(self, space: Space) -> tuple[Plan, ...]:
        """Return the plans of a search that contain this set.

        A level may imply one of another strategy. Only the plans with both are returned, to avoid
        duplicates.
        """
        levels = dict(self.levels)
        implied = (strategies.get(name).level(level).implies for name, level in self.levels)
        for name, level in (pair for each in implied for pair in each.items()):
            if level in space.choices(name):
                levels[name] = level
        return space.plans(levels)

    def leanest(self, space: Space) -> Plan | None:
        """Return the plan with this set that needs the least memory for activations.

        The smaller expected step time decides between equals.
        """
        found = [
            plan
            for plan in self.plans(space)
            if plan.unsized == plan and not any(strategy.remedies for strategy, _ in plan)
        ]
        plan = min(found, key=by_activations, default=None)
        if plan is None or not self.own_process:
            return plan
        return space.remedied(plan, Waste.FRAGMENTATION) or plan


def level_sets_needed(
    space: Space, facts: Facts, budget: int, *, cuda: bool
) -> tuple[LevelSet, ...] | None:
    """Return the level sets of which a plan needs one; ``None`` if no set is needed.

    No set is needed if the static memory of a plan of the usual space may fit ``budget`` bytes.
    ``None`` is also returned if nothing is known of the model.
    """
    plans = (Plan(), *space.plans())
    if not facts.roots or any(least_bytes(p, facts, cuda=cuda) <= budget for p in plans):
        return None
    return level_sets_within(space, facts, budget, cuda=cuda)


@lru_cache(maxsize=4)
def level_sets_within(
    space: Space, facts: Facts, budget: int, *, cuda: bool
) -> tuple[LevelSet, ...]:
    """Return the level sets under which the static memory may fit ``budget`` bytes.

    Sets that are expected to leave memory free come before sets that may not fit. The fit can be
    uncertain, because the size of an optimizer's state and the allocator's waste are estimates.
    Within both groups, four criteria follow: no adapters, fewer levels of fidelity ``recipe``, a
    split batch, and the smaller expected step time.
    """
    found = []
    for levels in _sets(space):
        plan = space.ranked(Plan.of(levels))
        if least_bytes(plan, facts, cuda=cuda) <= budget and clash(plan) is None:
            free_bytes = budget - expected_bytes(plan, facts, budget, cuda=cuda)
            order = (free_bytes <= 0, *by_change(plan, facts))
            found.append((order, LevelSet(tuple(levels.items()), free_bytes)))
    return tuple(each for _, each in sorted(found, key=lambda pair: pair[0]))


def next_level_set(
    found: Sequence[LevelSet], space: Space, finished: Sequence[TrialRecord]
) -> LevelSet | None:
    """Return the level set to try next while no plan fits; ``None`` if none is left.

    If a set ran out of memory in a fragmented heap, it is tried again in a process of its own.
    Otherwise the next set must leave clearly more memory free. After ``MAX_SHORT`` sets ran out of
    memory, the set that leaves the most is tried in a process of its own. This is repeated for each
    level that freezes the weights, first for training all of them.
    """
    ended = _trials_by_set(found, space, finished)
    short = [each for each in ended if ended[each][-1].verdict is Verdict.OUT_OF_MEMORY]
    left = [each for each in found if each not in ended]
    if not short:
        return next(iter(left), None)
    uncertain = [each for each in short if not _ruled_out(each, space, ended[each])]
    for each in uncertain:
        if fragmentation(ended[each][-1]) >= FRAGMENTED:
            return replace(each, own_process=True)
    extra = MIN_EXTRA * max(trial.budget for trial in finished)
    enough = max(each.free_bytes for each in short) + extra
    larger = [each for each in left if each.free_bytes >= enough]
    if larger and len(short) < MAX_SHORT:
        return larger[0]
    freezing = (strategy.name for strategy in strategies.REGISTRY if strategy.freezes)
    frozen = [(name, level) for name in freezing for level in space.choices(name)]
    for level in frozen:
        same = [each for each in (*short, *left) if level in each.levels]
        largest = max(same, key=lambda each: each.free_bytes, default=None)
        if largest is not None and (largest in left or largest in uncertain):
            return replace(largest, own_process=True)
    return None


def _trials_by_set(
    found: Sequence[LevelSet], space: Space, finished: Sequence[TrialRecord]
) -> dict[LevelSet, list[TrialRecord]]:
    """Return the trials that tested each set, in the order in which they finished.

    A trial tests a set if its plan is the set's leanest, whatever its allocator setting.
    """
    known = {each.levels: each for each in found}
    ended: dict[LevelSet, list[TrialRecord]] = {}
    for trial in finished:
        level_set = known.get(LevelSet.of(trial.plan).levels)
        plan = trial.plan.without_remedy(Waste.FRAGMENTATION)
        if level_set is not None and plan == level_set.leanest(space):
            ended.setdefault(level_set, []).append(trial)
    return ended


def _ruled_out(level_set: LevelSet, space: Space, trials: Sequence[TrialRecord]) -> bool:
    """Return whether another trial of a set, in a process of its own, cannot help.

    That is so if the set ran out of memory as the first plan of its process, without fragmentation.
    It is also so if the other trial would repeat a plan, because a study tries no plan twice.
    """
    lean = replace(level_set, own_process=True).leanest(space)
    if any(trial.plan == lean for trial in trials):
        return True
    first = [trial for trial in trials if trial.report is not None and trial.report.index == 0]
    return any(fragmentation(trial) < FRAGMENTED for trial in first)


def _sets(space: Space) -> Iterator[Mapping[str, str]]:
    """Yield every combination of levels that lower static memory, the batch split and whole."""
    splits = [AUTO, AS_IS] if AUTO in space.choices(SPLIT) else [AS_IS]
    each = []
    for name in STATIC_STRATEGIES:  # the first choice is as_is, or what a search takes in its place
        strategy, (first, *others) = strategies.get(name), space.choices(name)
        each.append([first, *(n for n in others if not strategy.lowered(n).isdisjoint(KINDS))])
    for split, levels in itertools.product(splits, itertools.product(*each)):
        yield {**dict(zip(STATIC_STRATEGIES, levels, strict=True)), SPLIT: split}
