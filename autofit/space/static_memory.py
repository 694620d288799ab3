"""The memory of a plan by arithmetic: the only module that predicts bytes.

``expected_bytes`` is the best guess before a launch, ``least_bytes`` the lower bound, and
``freed_bytes`` the difference of two plans. ``autofit/analysis/cost_model.py`` fits the factors of
the same structure to trials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from autofit.plan import Plan
from autofit.strategies import Facts, Memory

STATE = {True: (2.0, 0.1), False: (1.0, 1.0)}
"""Numbers of optimizer state a parameter, and the width of that prior: for Adam, for others."""
KINDS = (Memory.WEIGHTS, Memory.GRADIENTS, Memory.OPTIMIZER_STATE)
"""The kinds of memory that do not depend on the batch."""
CONTEXT = 0.6 * 2**30
"""Bytes of a CUDA context and its libraries, until a trial has measured them."""
CPU_CONTEXT = 0.02
"""Share of the budget that stands for the context on the CPU."""
WASTE = 0.06
"""Share of the memory lost to fragmentation with the script's own allocator settings."""


@dataclass(frozen=True, slots=True)
class Static:
    """Bytes of the unchanged script that do not depend on the batch."""

    weights: float
    gradients: float
    state: float
    unsure: float
    """Standard deviation of the logarithm of ``state``."""

    @classmethod
    def of(cls, facts: Facts) -> Static:
        """Return the bytes of a script with these facts."""
        weights = sum(root.parameter_bytes for root in facts.roots)
        sizes = {"float64": 8, "float32": 4}
        gradients = sum(root.trainable * sizes.get(root.dtype, 2) for root in facts.roots)
        numbers, unsure = STATE[_is_adam(facts)]
        return cls(float(weights), float(gradients), numbers * gradients, unsure)

    def by_kind(self, plan: Plan) -> dict[Memory, float]:
        """Return the bytes of weights, gradients and state under ``plan``, each by its kind."""
        sizes = (self.weights, self.gradients, self.state)
        return {
            kind: size * remaining_share(plan, kind)
            for kind, size in zip(KINDS, sizes, strict=True)
        }

    def under(self, plan: Plan) -> float:
        """Return the bytes of weights, gradients and state under ``plan``."""
        return sum(self.by_kind(plan).values())

    def made(self, plan: Plan, *, cuda: bool) -> float:
        """Return the bytes of the weights while the script makes the model under ``plan``."""
        shares = (strategy.level(level).made for strategy, level in plan)
        return self.weights * (math.prod(shares) if cuda else 1.0)


def remaining_share(plan: Plan, kind: Memory, facts: Facts | None = None) -> float:
    """Return the expected share of a kind of memory that remains under ``plan``.

    With ``facts``, the share of the activations is that in this script.
    """
    levels = plan.levels
    if facts is not None and kind is Memory.ACTIVATIONS:
        lowering = ((s, level) for s, level in plan if kind in s.lowered(level))
        return math.prod(strategy.expected_share(level, facts) for strategy, level in lowering)
    return math.prod(strategy.keeps(level, kind, levels) for strategy, level in plan)


def total_bytes(held: Any, waste: Any, context: Any) -> Any:
    """Return the peak of a process that holds these bytes: every prediction adds up this way.

    ``waste``: the share of ``WASTE`` that the allocator still loses to fragmentation. All are
    numbers, or NumPy arrays as in the cost model.
    """
    return held * (1.0 + WASTE * waste) + context


def expected_bytes(plan: Plan, facts: Facts, budget: int, *, cuda: bool) -> float:
    """Return the bytes that a plan is expected to hold, activations excluded.

    The best guess: ``autofit/analysis/feasibility.py`` orders sets of levels by it.
    """
    static = Static.of(facts)
    most = max(static.under(plan), static.made(plan, cuda=cuda))
    return float(total_bytes(most, 1.0, context(budget, cuda=cuda)))


def least_bytes(plan: Plan, facts: Facts, *, cuda: bool) -> float:
    """Return a lower bound of the bytes under a plan, activations excluded.

    Unlike ``expected_bytes`` it counts neither context nor waste. Optimizer state counts only if
    every optimizer is known to be Adam-like. A plan whose bound exceeds the budget is never
    launched.
    """
    static = Static.of(facts)
    known = bool(facts.optimizers) and _is_adam(facts)
    static = static if known else Static(static.weights, static.gradients, 0.0, static.unsure)
    return max(static.under(plan), static.made(plan, cuda=cuda))


def freed_bytes(plan: Plan, other: Plan, facts: Facts, budget: int) -> float:
    """Return the bytes that ``other`` is expected to need less than ``plan``.

    ``plan`` filled ``budget`` bytes. Activations are what the budget holds beside the static
    memory; they shrink with the samples of a chunk.
    """
    static = Static.of(facts)
    held = dict(zip(KINDS, (static.weights, static.gradients, static.state), strict=True))
    held[Memory.ACTIVATIONS] = max(0.0, budget - sum(held.values()))
    size, smaller = chunk_samples(plan, facts), chunk_samples(other, facts)
    freed = 0.0
    for kind, size_of_kind in held.items():
        before, after = (remaining_share(each, kind, facts) for each in (plan, other))
        if kind is Memory.ACTIVATIONS and size and smaller:
            after *= smaller / size
        freed += size_of_kind * (before - after) / before
    return freed


def chunk_samples(plan: Plan, facts: Facts) -> int | None:
    """Return the samples in a chunk; ``None`` if the batch is not known."""
    return plan.chunk if plan.splits else facts.batch


def context(budget: int, *, cuda: bool) -> float:
    """Return the bytes that a process holds before it makes a model."""
    return CONTEXT if cuda else CPU_CONTEXT * budget


def _is_adam(facts: Facts) -> bool:
    return all("Adam" in name for name in facts.optimizers)
