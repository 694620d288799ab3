"""The search space: the levels of each strategy that this script and hardware allow."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autofit import strategies
from autofit.plan import Plan
from autofit.space.order import by_cost
from autofit.strategies import (
    AS_IS,
    AUTO,
    RANKS,
    Facts,
    Fidelity,
    Hardware,
    Number,
    Strategy,
    Waste,
    counting,
)

Reason = tuple[str, str, str]
"""``(strategy, level, reason why the search leaves the level out)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The levels that a search may try, and why it leaves the others out."""

    levels: tuple[tuple[str, tuple[str, ...]], ...]
    """Each strategy with its levels, ``as_is`` first, in the catalogue's order."""
    left_out: tuple[Reason, ...] = ()

    def plans(self, fixed: Mapping[str, str] | None = None) -> tuple[Plan, ...]:
        """Return every plan that a search may launch besides the neutral one, cheapest first.

        Every plan splits the batch and checkpoints if it can. The search for its numbers tries the
        whole batch and no block too, so that a plan without them would be measured twice. A level
        that is never worse than ``as_is`` replaces it. If there is a number of ranks, every plan
        has it.
        ``refinements`` returns the plans with levels that refine.

        ``fixed`` holds levels that every plan must have.
        """
        names = [name for name, _ in self.levels]
        given = {name: (level,) for name, level in (fixed or {}).items()}
        combinations = itertools.product(*(given.get(name) or self._tried(name) for name in names))
        combined = (Plan.of(dict(zip(names, levels, strict=True))) for levels in combinations)
        plans = {_possible(plan, given) for plan in combined}
        tried = (plan for plan in plans if not plan.neutral and not clash(plan))
        return tuple(sorted(tried, key=by_cost))

    def refinements(self, plan: Plan) -> tuple[Plan, ...]:
        """Return the plans that differ from ``plan`` in one level with ``refines``.

        The level is added, or replaces another level of its strategy. As in ``plans``, levels that
        are never worse are included and the batch is split. If ``plan`` does not split the batch,
        plans without a split are returned too, because some levels gain from a whole batch. The
        number of ranks, if there is one, is included as well.
        """
        tried = {name: self._tried(name) for name, _ in self.levels}
        first = {name: each[0] for name, each in tried.items() if AS_IS not in each}
        base = self.ranked(plan)
        if self.ranks == 1:  # no level is left that needs others
            base = base.without(RANKS)
        base = base.replace(**{name: first[name] for name in first if plan[name] == AS_IS})
        whole = base.with_number(Number.SAMPLES, plan.level_of(Number.SAMPLES))
        bases = dict.fromkeys((base, whole))
        found = dict.fromkeys(  # keeps the order, also for plans of equal cost
            each.replace(**{name: level})
            for each in bases
            for name, levels in self.levels
            for level in levels
            if level != each[name] and strategies.get(name).level(level).refines
        )
        return tuple(sorted((each for each in found if not clash(each)), key=by_cost))

    @property
    def ranks(self) -> int:
        """Number of ranks that every plan has."""
        return 1 if self._ranks == AS_IS else int(self._ranks)

    @property
    def _ranks(self) -> str:
        return dict(self.levels).get(RANKS, (AS_IS,))[-1]

    def ranked(self, plan: Plan) -> Plan:
        """Return ``plan`` with the number of ranks that every plan has."""
        return plan.with_number(Number.RANKS, self._ranks)

    def remedied(self, plan: Plan, waste: Waste) -> Plan | None:
        """Return ``plan`` with the last level that lowers ``waste``; ``None`` if there is none."""
        found = (strategy.name for strategy in strategies.REGISTRY if strategy.remedies is waste)
        levels = ((name, self.choices(name)[-1]) for name in found)
        return next((plan.replace(**{n: level}) for n, level in levels if level != AS_IS), None)

    def choices(self, name: str) -> tuple[str, ...]:
        """Return the levels of a strategy, without ``as_is`` if another level is never worse."""
        levels = dict(self.levels)[name]
        better = any(strategies.get(name).level(each).replaces_as_is for each in levels)
        return tuple(each for each in levels if not (better and each == AS_IS))

    def _tried(self, name: str) -> tuple[str, ...]:
        choices = self.choices(name)
        if AUTO in choices:
            return (AUTO,)
        known = strategies.get(name)
        if known.number is Number.RANKS:
            return (self._ranks,)
        return tuple(each for each in choices if not known.level(each).refines)


def space(
    hardware: Hardware,
    facts: Facts,
    *,
    allow: Fidelity,
    only: frozenset[str] = frozenset(),
    without: frozenset[str] = frozenset(),
    refused: Iterable[Reason] = (),
) -> Space:
    """Return the levels that may be tried, from the hardware and the known facts of the script.

    ``allow`` is the most that a level may change. ``refused`` holds the levels that trials have
    ruled out, with their reasons.
    """
    known = {(name, level): reason for name, level, reason in refused}
    levels: list[tuple[str, tuple[str, ...]]] = []
    left_out: list[Reason] = []
    for strategy in strategies.REGISTRY:
        chosen = strategy.name not in without and (not only or strategy.name in only)
        possible = [AS_IS]
        for level in strategy.offered(hardware, facts) if chosen else ():
            reason = known.get((strategy.name, level)) or _reason(
                strategy, level, hardware, facts, allow
            )
            if reason is None:
                possible.append(level)
            else:
                left_out.append((strategy.name, level, reason))
        levels.append((strategy.name, tuple(possible)))
    return Space(levels=tuple(levels), left_out=tuple(left_out))


def _reason(
    strategy: Strategy, level: str, hardware: Hardware, facts: Facts, allow: Fidelity
) -> str | None:
    fidelity = strategy.fidelity(level, facts)
    if fidelity > allow:
        return f"{fidelity}, and only {allow} is allowed"
    return strategy.unavailable(level, hardware) or strategy.inapplicable(level, facts)


def _possible(plan: Plan, given: Mapping[str, object]) -> Plan:
    """Return ``plan`` without a number to be found, if its other levels rule out that only."""
    if not clash(plan):
        return plan
    numbers = (Number.SAMPLES, Number.BLOCKS)
    fewer = [plan.with_number(n, AS_IS) for n in numbers if counting(n).name not in given]
    return next((each for each in fewer if not clash(each)), plan)


def clash(plan: Plan) -> str | None:
    """Return why the levels of ``plan`` cannot be combined, or ``None`` if they can.

    >>> clash(Plan.of({"sharding": "zero2"}))
    'sharding needs several ranks'
    """
    levels = plan.levels
    reasons = (strategy.clashes(level, levels) for strategy, level in plan)
    return next((reason for reason in reasons if reason), None)
