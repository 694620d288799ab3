"""Which levels can be combined: derived from the strategies' own rules.

This module knows only what is refused before a launch. ``tests/strategies/test_pairs.py`` tests
what a pair does to a training. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autofit.exceptions import UsageError
from autofit.plan import Plan
from autofit.space.catalogue import clash
from autofit.strategies import AS_IS, REGISTRY, Strategy

FOUR = "4"
"""The fewest ranks that form two groups of several."""

StrategyLevel = tuple[str, str]
"""``(strategy, level)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelPair:
    """Two changed levels of different strategies, in the catalogue's order."""

    one: StrategyLevel
    other: StrategyLevel
    needs: tuple[tuple[StrategyLevel, StrategyLevel], ...] = ()
    """A level of the two that needs another level, and the first level that serves."""
    reason: str | None = None
    """Why no plan holds both; ``None`` if they can be combined."""

    @property
    def plan(self) -> Plan:
        """The plan with both levels and the levels that they need."""
        return Plan.of(dict((*(need for _, need in self.needs), self.one, self.other)))


def pairs(registry: Sequence[Strategy] = REGISTRY) -> tuple[LevelPair, ...]:
    """Return every pair of levels of two strategies."""
    needs = {each: _needed(each, registry) for s in registry for each in _changed(s)}
    found = (
        LevelPair(
            one=a, other=b, needs=tuple((each, need) for each in (a, b) for need in needs[each])
        )
        for one, other in itertools.combinations(registry, 2)
        for a, b in itertools.product(_changed(one), _changed(other))
    )
    return tuple(replace(pair, reason=clash(pair.plan)) for pair in found)


def _needed(level: StrategyLevel, registry: Sequence[Strategy]) -> tuple[StrategyLevel, ...]:
    """Return the level that ``level`` needs beside it; most need none."""
    if clash(Plan.of(dict([level]))) is None:
        return ()
    others = (each for s in registry for each in _tried(s) if s.name != level[0])
    return tuple(each for each in others if clash(Plan.of(dict((level, each)))) is None)[:1]


def _tried(strategy: Strategy) -> list[StrategyLevel]:
    """Return the changed levels, and ``FOUR`` if every number is a level of the strategy."""
    try:
        strategy.level(FOUR)
    except UsageError:
        return _changed(strategy)
    return [*_changed(strategy), (strategy.name, FOUR)]


def _changed(strategy: Strategy) -> list[StrategyLevel]:
    return [(strategy.name, level.name) for level in strategy.levels if level.name != AS_IS]
