"""Levels that must stand together, where what a script holds whatever its batch does not fit.

Weights, gradients and optimizer state are arithmetic, so no launch is spent on learning that one
level alone does not lower them enough. Where they exceed the budget under every plan that a search
would combine, the sets of levels under which they fit are its ground: each is launched where it
needs least for the activations, and all that follows stands on one that has been seen to fit.
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
from autofit.strategies import AS_IS, Facts
from autofit.strategies.allocator import EXPANDABLE
from autofit.strategies.micro_batch import AUTO
from autofit.worker.records.trials import Verdict

MORE = 0.05
"""Share of the budget by which a set must leave more room than one that has run out of memory."""
PATIENCE = 2
"""Sets that may run out of memory before those that leave most room are tried, as the last."""
NAMES = tuple(
    strategy.name
    for strategy in strategies.REGISTRY
    if any(
        strategy.keeps(each.name, kind, {}) < 1 for each in strategy.levels[1:] for kind in KINDS
    )
)
"""Strategies that lower what is held whatever the batch."""


@dataclass(frozen=True, slots=True)
class LevelSet:
    """A set of levels under which what is held whatever the batch fits."""

    levels: tuple[tuple[str, str], ...]
    """A level for each of ``NAMES``, and whether the batch is split."""
    room: float
    """Bytes that are expected to be left for activations; below zero where that is not sure."""
    alone: bool = False
    """It is tried first in a process of its own, with segments that grow where there are any."""

    @classmethod
    def of(cls, plan: Plan) -> LevelSet:
        """Return what a plan stands on; its room is not known."""
        split = AS_IS if plan["micro_batch"] == AS_IS else AUTO
        return cls((*((name, plan[name]) for name in NAMES), ("micro_batch", split)), 0.0)

    def plans(self, space: Space) -> tuple[Plan, ...]:
        """Return the plans of a search that stand on it.

        Weights in bf16 enter bf16 autocast, so that of both precisions the one that says so stays.
        """
        levels = dict(self.levels)
        half = levels["weights"] != AS_IS and "bf16" in space.choices("precision")
        return space.plans({**levels, "precision": "bf16"} if half else levels)

    def leanest(self, space: Space) -> Plan | None:
        """Return the plan on it that is expected to need least for activations, then least time."""
        grows = self.alone and EXPANDABLE in space.choices("allocator")
        found = [
            plan
            for plan in self.plans(space)
            if plan.unsized == plan and plan["allocator"] == plan["data_loading"] == AS_IS
        ]
        plan = min(found, key=by_activations, default=None)
        return plan.replace(allocator=EXPANDABLE) if plan is not None and grows else plan


def level_sets_needed(
    space: Space, facts: Facts, budget: int, *, cuda: bool
) -> tuple[LevelSet, ...] | None:
    """Return the sets of levels of which a plan needs one; ``None`` where it can do without.

    So it is where what a plan that a search would combine holds at least is within ``budget``, or
    nothing is known of the model.
    """
    plans = (Plan(), *space.plans())
    if not facts.roots or any(least_bytes(p, facts, cuda=cuda) <= budget for p in plans):
        return None
    return level_sets_within(space, facts, budget, cuda=cuda)


@lru_cache(maxsize=4)
def level_sets_within(
    space: Space, facts: Facts, budget: int, *, cuda: bool
) -> tuple[LevelSet, ...]:
    """Return the sets of levels that bring what is held whatever the batch within ``budget``.

    Those that are expected to leave room come first, then those that may fit: how much an optimizer
    keeps, or an allocator wastes, is not sure. Of either those that train all of the model, with
    the fewest levels that train otherwise; then those that split the batch, which leaves most for
    everything else, then the least loss of speed.
    """
    found = []
    for levels in _sets(space):
        plan = Plan.of(levels)
        if least_bytes(plan, facts, cuda=cuda) <= budget and clash(plan) is None:
            room = budget - expected_bytes(plan, facts, budget, cuda=cuda)
            order = (room <= 0, *by_change(plan, facts))
            found.append((order, LevelSet(tuple(levels.items()), room)))
    return tuple(each for _, each in sorted(found, key=lambda pair: pair[0]))


def next_level_set(
    found: Sequence[LevelSet], space: Space, finished: Sequence[TrialRecord]
) -> LevelSet | None:
    """Return the set to try next while no plan fits; ``None`` after the last.

    One that ran out of memory is followed by one that leaves clearly more room, or by itself alone
    where the heap was in pieces. After ``PATIENCE`` of them comes the one that leaves most, alone:
    of those that train all of the model, then of each kind of adapters, which may free less.
    """
    ended = _ended(found, space, finished)
    short = [each for each in ended if ended[each][-1].verdict is Verdict.OUT_OF_MEMORY]
    left = [each for each in found if each not in ended]
    if not short:
        return next(iter(left), None)
    doubted = [each for each in short if not _ruled_out(each, space, ended[each])]
    for each in doubted:
        if fragmentation(ended[each][-1]) >= FRAGMENTED:
            return replace(each, alone=True)
    enough = max(each.room for each in short) + MORE * max(trial.budget for trial in finished)
    roomier = [each for each in left if each.room >= enough]
    if roomier and len(short) < PATIENCE:
        return roomier[0]
    for level in space.choices("adapters"):
        alike = [each for each in (*short, *left) if ("adapters", level) in each.levels]
        most = max(alike, key=lambda each: each.room, default=None)
        if most is not None and (most in left or most in doubted):
            return replace(most, alone=True)
    return None


def _ended(
    found: Sequence[LevelSet], space: Space, finished: Sequence[TrialRecord]
) -> dict[LevelSet, list[TrialRecord]]:
    """Return the trials that were to show whether a set is enough, by set, each in their order."""
    known = {each.levels: each for each in found}
    ended: dict[LevelSet, list[TrialRecord]] = {}
    for trial in finished:
        level_set = known.get(LevelSet.of(trial.plan).levels)
        plan = trial.plan.replace(allocator=AS_IS)  # alone or not
        if level_set is not None and plan == level_set.leanest(space):
            ended.setdefault(level_set, []).append(trial)
    return ended


def _ruled_out(level_set: LevelSet, space: Space, trials: Sequence[TrialRecord]) -> bool:
    """Return whether a set ran out of memory by itself: no plan before it, no heap in pieces.

    So is one that by itself would be the very plan that ran out: a study tries no plan twice.
    """
    lean = replace(level_set, alone=True).leanest(space)
    if any(trial.plan == lean for trial in trials):
        return True
    first = [trial for trial in trials if trial.report is not None and trial.report.index == 0]
    return any(fragmentation(trial) < FRAGMENTED for trial in first)


def _sets(space: Space) -> Iterator[Mapping[str, str]]:
    """Yield a level for each of ``NAMES``, beside a batch that is split and one that is not."""
    choices = dict(space.levels)
    splits = [AUTO, AS_IS] if AUTO in choices["micro_batch"] else [AS_IS]
    each = [_lowering(name, space.choices(name)) for name in NAMES]
    for split, levels in itertools.product(splits, itertools.product(*each)):
        yield {**dict(zip(NAMES, levels, strict=True)), "micro_batch": split}


def _lowering(name: str, choices: tuple[str, ...]) -> tuple[str, ...]:
    """Return what stands for ``as_is``, and the levels that lower something here."""
    strategy = strategies.get(name)
    first, *others = choices
    return first, *(each for each in others if not strategy.lowered(each).isdisjoint(KINDS))
