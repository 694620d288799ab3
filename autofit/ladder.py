"""The order of retreat: which plans need less memory, and what they are expected to cost.

Leaner is a partial order: a plan is leaner than another when it goes at least as far in every
strategy and further in one. Only strategies that lower activations are ordered so; the order
holds between levels of one strategy as the catalogue lists them.
"""

from __future__ import annotations

from collections.abc import Iterable

from autofit import strategies
from autofit.plan import Plan
from autofit.space import order_of_retreat

ORDERED = ("checkpointing",)
"""Strategies whose later levels always need less memory and more time than their earlier ones.

Not precision (bf16 is leaner and faster), not the micro-batch (the ramp is inside the trial).
"""


def leaner(plan: Plan, than: Plan) -> bool:
    """Return whether ``plan`` differs from ``than`` by going further down, and by nothing else."""
    further = [_depth(name, plan) - _depth(name, than) for name in ORDERED]
    rest = {name: level for name, level in plan.levels.items() if name not in ORDERED}
    same = all(than[name] == level for name, level in rest.items())
    return same and min(further) >= 0 and max(further) > 0


def rungs(plan: Plan, plans: Iterable[Plan]) -> list[Plan]:
    """Return the plans to retreat to from ``plan``: cheapest expected loss of speed first."""
    others = (each for each in plans if each != plan and not leaner(plan, each))
    return sorted(others, key=order_of_retreat)


def _depth(name: str, plan: Plan) -> int:
    names = [level.name for level in strategies.get(name).levels]
    return names.index(plan[name])
