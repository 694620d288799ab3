"""Which of two plans is leaner: the only module that orders plans by memory or expected speed.

Four questions need four orders:

- ``leaner``: does it always need less memory? A partial order: one trial answers for other plans.
- ``only_saves``: differs by optional levels that cannot gain speed?
- ``by_cost``: a sort key over all plans, by the speed that a plan gives up for memory.
- ``by_activations``: a sort key for plans that keep the same weights, gradients and state.

A plan that was measured has a peak; ``autofit/analysis`` compares peaks where there are some.
"""

from __future__ import annotations

import math

from autofit import strategies
from autofit.plan import Plan
from autofit.space.static_memory import remaining_share
from autofit.strategies import AS_IS, Facts, Fidelity, Memory


def leaner(plan: Plan, than: Plan) -> bool:
    """Return whether ``plan`` differs from ``than`` only by leaner levels of ordered strategies."""
    differing = [name for name, level in plan.levels.items() if than[name] != level]
    return bool(differing) and all(plan[name] in lower(name, than[name]) for name in differing)


def lower(name: str, level: str) -> tuple[str, ...]:
    """Return the levels of a strategy that always need less memory than ``level``, in order.

    >>> lower("checkpointing", "as_is")
    ('auto', 'all')
    """
    ordered = strategies.get(name).ordered
    if level == AS_IS:
        return ordered[1:]
    return ordered[ordered.index(level) + 1 :] if level in ordered else ()


def only_saves(plan: Plan, than: Plan) -> bool:
    """Return whether ``plan`` differs from ``than`` only by optional levels that gain no speed."""
    known = [(strategies.get(name), level) for name, level in plan.levels.items()]
    found = [(s.level(level), s.level(than[s.name])) for s, level in known if level != than[s.name]]
    return bool(found) and all(
        new.refines and new.launches is None and new.slowdown >= max(1.0, old.slowdown)
        for new, old in found
    )


def by_cost(plan: Plan) -> tuple[float, float, float]:
    """Return the sort key of all plans: the plan that gives up least speed for memory comes first.

    The first figure is the product of the plan's slowdowns. The second, for equal plans, is the
    expected step time relative to the script without a plan. So every precision comes before any of
    them with more checkpointing. The third puts a level that depends on the batch's size after the
    same plan without it, because that plan finds the size.
    """
    slowdowns = [strategy.level(level).slowdown for strategy, level in plan]
    sized = [strategy.level(level).slowdown for strategy, level in plan if strategy.sized]
    return (
        math.prod(max(1.0, each) for each in slowdowns),
        expected(plan.unsized),
        -math.prod(sized),
    )


def expected(plan: Plan, facts: Facts | None = None) -> float:
    """Return the expected step time of a plan, relative to the script without a plan."""
    if facts is not None:
        return math.prod(strategy.expected_slowdown(level, facts) for strategy, level in plan)
    return math.prod(strategy.level(level).slowdown for strategy, level in plan)


def by_activations(plan: Plan) -> tuple[float, float]:
    """Return the sort key of plans that differ in their activations: least memory, then time."""
    return remaining_share(plan, Memory.ACTIVATIONS), expected(plan)


def by_change(plan: Plan, facts: Facts) -> tuple[bool, int, bool, float]:
    """Return the sort key of plans that fit alike: least change of the training, then time.

    Plans that train all weights come first, then those with few levels that train otherwise. Plans
    that split the batch come before those that do not, because splitting leaves most memory free.
    """
    others = sum(s.fidelity(level, facts) is Fidelity.RECIPE for s, level in plan)
    freezes = any(strategy.freezes for strategy, _ in plan)
    return freezes, others, not plan.splits, expected(plan)
