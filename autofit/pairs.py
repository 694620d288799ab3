"""Which levels of the catalogue stand beside one another: derived from what the strategies say.

Imports no torch. What a pair does to a training is put to the test in
``tests/strategies/test_pairs.py``; here is only what is refused before a launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autofit.plan import Plan
from autofit.space import clash
from autofit.strategies import AS_IS, REGISTRY, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two changed levels of different strategies, in the catalogue's order."""

    one: tuple[str, str]
    """``(strategy, level)``."""
    other: tuple[str, str]
    reason: str | None
    """Why no plan holds both; ``None`` where they stand beside one another."""


def pairs(registry: Sequence[Strategy] = REGISTRY) -> tuple[Pair, ...]:
    """Return every pair of the catalogue."""
    return tuple(
        Pair(one=a, other=b, reason=clash(Plan.of(dict((a, b)))))
        for one, other in itertools.combinations(registry, 2)
        for a, b in itertools.product(_changed(one), _changed(other))
    )


def _changed(strategy: Strategy) -> list[tuple[str, str]]:
    return [(strategy.name, level.name) for level in strategy.levels if level.name != AS_IS]
