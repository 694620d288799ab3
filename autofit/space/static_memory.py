"""Bytes that a script holds whatever its batch: arithmetic on what is known of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autofit.plan import Plan
from autofit.strategies import Facts, Memory

STATE = {True: (2.0, 0.1), False: (1.0, 1.0)}
"""Of Adam and its kin, and of others: numbers kept a parameter, and how unsure that is."""
KINDS = (Memory.WEIGHTS, Memory.GRADIENTS, Memory.OPTIMIZER_STATE)
"""What a script holds whatever its batch."""
CONTEXT = 0.6 * 2**30
"""Bytes that a CUDA context and its libraries hold, before one was measured."""
WASTE = 0.06
"""Share of the memory lost to fragmentation, where the allocator is as it is."""


@dataclass(frozen=True, slots=True)
class Static:
    """Bytes that do not depend on the batch, in the script as it is."""

    weights: float
    gradients: float
    state: float
    unsure: float
    """Of the logarithm of ``state``."""

    @classmethod
    def of(cls, facts: Facts) -> Static:
        """Return what arithmetic says."""
        weights = sum(root.parameter_bytes for root in facts.roots)
        gradients = sum(root.trainable * _element(root.dtype) for root in facts.roots)
        numbers, unsure = STATE[_is_adam(facts)]
        return cls(float(weights), float(gradients), numbers * gradients, unsure)

    def under(self, plan: Plan) -> float:
        """Return the bytes that are left of all three under ``plan``."""
        sizes = (self.weights, self.gradients, self.state)
        return sum(
            size * remaining_share(plan, kind) for kind, size in zip(KINDS, sizes, strict=True)
        )

    def made(self, plan: Plan, *, cuda: bool) -> float:
        """Return the bytes of the weights while the model is made under ``plan``."""
        shares = (strategy.level(level).made for strategy, level in plan)
        return self.weights * (math.prod(shares) if cuda else 1.0)


def remaining_share(plan: Plan, kind: Memory) -> float:
    """Return the share of a kind of memory that the levels of ``plan`` are expected to leave."""
    levels = plan.levels
    return math.prod(strategy.keeps(level, kind, levels) for strategy, level in plan)


def expected_bytes(plan: Plan, facts: Facts, budget: int, *, cuda: bool) -> float:
    """Return the bytes a plan is expected to hold before there is any activation."""
    static = Static.of(facts)
    most = max(static.under(plan), static.made(plan, cuda=cuda))
    return most * (1 + WASTE) + context(budget, cuda=cuda)


def least_bytes(plan: Plan, facts: Facts, *, cuda: bool) -> float:
    """Return the bytes a plan holds at least: state only of an optimizer that surely has some."""
    static = Static.of(facts)
    known = bool(facts.optimizers) and _is_adam(facts)
    static = static if known else Static(static.weights, static.gradients, 0.0, static.unsure)
    return max(static.under(plan), static.made(plan, cuda=cuda))


def context(budget: int, *, cuda: bool) -> float:
    """Return the bytes that a process holds before it trains anything."""
    return CONTEXT if cuda else 0.02 * budget


def _is_adam(facts: Facts) -> bool:
    return all("Adam" in name for name in facts.optimizers)


def _element(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)
