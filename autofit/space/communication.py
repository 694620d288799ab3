"""What ranks send to one another in an optimizer step, and how fast: priors of the cost model."""

from __future__ import annotations

import math

from autofit.plan import Plan
from autofit.space.static_memory import Static
from autofit.strategies import Facts, Memory
from autofit.strategies.ranks import Ranks, count
from autofit.strategies.sharding import WEIGHTS, Sharding

BANDWIDTHS = {"nvlink": 80e9, "pcie": 12e9, "": 30e9}
"""Bytes a second that a GPU sends in a collective, by ``Hardware.link``; copies and waiting count.

A decoder of 1.1 B parameters on two H200s took 0.055 s longer than half of its step time on one.
It sends 4.4 GB in a step, which makes 80 GB/s. An unknown link is between the two known ones.
"""
CPU_BANDWIDTH = 1e9
"""The same for gloo, between processes of one machine."""


def sent_bytes(plan: Plan, facts: Facts) -> float:
    """Return the bytes that each rank sends in an optimizer step under ``plan``; 0 for one rank.

    A ring sends ``2 * (K - 1) / K`` times the bytes of what it sums over K ranks, and half as much
    of what it gathers or scatters. Fully sharded weights are gathered for forward and for backward,
    and their gradients are scattered. Gradients are summed after each call of the model.
    """
    ranks = count(plan[Ranks.name])
    if ranks == 1:
        return 0.0
    static, others = Static.of(facts), [pair for pair in plan if pair[0].name != Sharding.name]
    levels = plan.levels
    gradients, weights = (
        size * math.prod(strategy.keeps(level, kind, levels) for strategy, level in others)
        for size, kind in (
            (static.gradients, Memory.GRADIENTS),
            (static.weights, Memory.WEIGHTS),
        )
    )
    shards = WEIGHTS.get(plan[Sharding.name])
    whole = 2 * gradients
    if shards is not None:
        whole = (2 if shards.gathers_twice else 1) * weights + gradients
    return (ranks - 1) / ranks * whole * facts.calls_per_step


def bandwidth(link: str, *, cuda: bool) -> float:
    """Return the bytes a second that a rank is expected to send. ``link``: as in ``Hardware``."""
    return BANDWIDTHS[link] if cuda else CPU_BANDWIDTH
