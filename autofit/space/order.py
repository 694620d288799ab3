"""The order of retreat: which plans need less memory, and what they are expected to cost.

Leaner is a partial order: a plan is leaner than another when it goes at least as far in every
strategy and further in one. Only some strategies are ordered so; the order holds between levels of
one strategy as the catalogue lists them.
"""

from __future__ import annotations

from autofit.plan import Plan
from autofit.strategies import AS_IS

ORDERED = {"checkpointing": (AS_IS, "third", "half", "all"), "optimizer": ("fused", "eight_bit")}
"""Levels of which each always needs less memory, and more time, than those before it.

Not precision (bf16 is leaner and faster), not the micro-batch (the ramp is inside the trial). A
fused optimizer itself is leaner than the script's own, but not slower.
"""


def leaner(plan: Plan, than: Plan) -> bool:
    """Return whether ``plan`` differs from ``than`` by going further down, and by nothing else."""
    differing = [name for name, level in plan.levels.items() if than[name] != level]
    return bool(differing) and all(
        name in ORDERED and plan[name] in lower(name, than[name]) for name in differing
    )


def lower(name: str, level: str) -> tuple[str, ...]:
    """Return the levels of an ordered strategy that need less memory than ``level``."""
    ordered = ORDERED[name]
    if level == AS_IS:
        return ordered[1:]
    return ordered[ordered.index(level) + 1 :] if level in ordered else ()
