"""What ranks send to one another in an optimizer step, and how fast: priors of the cost model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autofit.facts import Bandwidth
from autofit.plan import Plan
from autofit.space.static_memory import Static
from autofit.strategies import Facts, Memory

BANDWIDTHS = {"nvlink": 80e9, "pcie": 12e9, "": 30e9}
"""Bytes a second that a GPU sends in a collective, by ``Hardware.link``; copies and waiting count.

A decoder of 1.1 B parameters on two H200s took 0.055 s longer than half of its step time on one.
It sends 4.4 GB in a step, which makes 80 GB/s. An unknown link is between the two known ones.
"""
CPU_BANDWIDTH = 1e9
"""The same for gloo, between processes of one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """Bytes that each rank sends in an optimizer step, by kind of collective."""

    all_reduce: float = 0.0
    all_gather: float = 0.0
    reduce_scatter: float = 0.0

    @property
    def total(self) -> float:
        """All bytes."""
        return self.all_reduce + self.all_gather + self.reduce_scatter

    def seconds(self, bandwidth: Bandwidth) -> float:
        """Return how long the bytes take."""
        return (
            self.all_reduce / bandwidth.all_reduce
            + self.all_gather / bandwidth.all_gather
            + self.reduce_scatter / bandwidth.reduce_scatter
        )


def sent_bytes(plan: Plan, facts: Facts) -> _Sent:
    """Return the bytes that each rank sends in an optimizer step under ``plan``; 0 for one rank.

    A ring sends ``2 * (K - 1) / K`` times the bytes of what it sums over K ranks, and half as much
    of what it gathers or scatters. Gradients are summed after each call of the model.

    Under ``zero1`` each rank also broadcasts the parameters that it has stepped. The ranks take
    turns, so this takes as long as all weights over one connection.

    Fully sharded weights are gathered for forward and for backward, and their gradients are
    scattered. Under ``hybrid`` this happens within each half of the ranks, and the halves sum what
    each rank keeps.
    """
    ranks, shards = plan.ranks, plan.shards
    if ranks == 1:
        return _Sent()
    static, others = Static.of(facts), [each for each in plan if not each[0].level(each[1]).shards]
    levels, calls = plan.levels, facts.calls_per_step
    gradients, weights = (
        size * math.prod(strategy.keeps(level, kind, levels) for strategy, level in others)
        for size, kind in (
            (static.gradients, Memory.GRADIENTS),
            (static.weights, Memory.WEIGHTS),
        )
    )
    if shards is None or not shards.weights:
        return _Sent(
            all_reduce=calls * _summed(gradients, ranks),
            all_gather=weights if shards is not None else 0.0,  # each rank steps its parameters
        )
    near = ranks // shards.groups
    times = 2 if shards.gathers_twice else 1
    return _Sent(
        all_reduce=calls * _summed(gradients / near, shards.groups),
        all_gather=calls * times * weights * (near - 1) / near,
        reduce_scatter=calls * gradients * (near - 1) / near,
    )


def _summed(size: float, ranks: int) -> float:
    """Return the bytes that each of ``ranks`` sends to sum ``size`` bytes."""
    return 2 * size * (ranks - 1) / ranks


def assumed(link: str, *, cuda: bool) -> Bandwidth:
    """Return the bandwidth of a machine on which it was not measured. ``link``: as in ``Hardware``.

    It is lower than a measured one: a training also waits between its messages.
    """
    rate = BANDWIDTHS[link] if cuda else CPU_BANDWIDTH
    return Bandwidth(all_reduce=rate, all_gather=rate, reduce_scatter=rate)
