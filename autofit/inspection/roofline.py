"""Which plan is likely the fastest on a card: a roofline. It gives an order of plans, not times."""

from __future__ import annotations

import math

from autofit.facts import Facts
from autofit.inspection.cards import GpuModel
from autofit.plan import Plan
from autofit.space.static_memory import chunk_samples
from autofit.worker.records.inspection import Work

HALF = "half"
LAUNCH = 25e-6
"""Seconds in which Python code launches an operation: 58 of them in the 1.5 ms of a block that
``autofit/analysis/priors.py`` assumes."""
ATTAINED = 0.6
"""Share of the data sheet's rates that large products attain, and of its bandwidth."""
TRAFFIC = 0.65
"""Share of the bytes that operations move where products compute in 16 bits: norms, losses and the
optimizer stay in float32."""


def relative_time(plan: Plan, work: Work, model: GpuModel, facts: Facts) -> float:
    """Return a figure that is larger for slower plans, near the seconds of a step.

    A step lasts as long as the GPU computes, or as long as its kernels are launched, chunk by
    chunk. Effects beside precision and chunks are the priors of each level.
    """
    computes = next((level.products for s, name in plan if (level := s.level(name)).products), "")
    rates = {"": model.float32, "tf32": model.tf32, HALF: model.half}
    products = work.products / rates[computes] + work.half_products / model.half
    traffic = work.traffic * (TRAFFIC if computes == HALF else 1.0)
    gpu = (products / 1e12 + traffic / (model.bandwidth * 1e9)) / ATTAINED
    host = work.launches * LAUNCH
    for strategy, name in plan:
        level = strategy.level(name)
        if not level.products and not strategy.sized:
            slowdown = strategy.expected_slowdown(name, facts)
            gpu *= slowdown
            host *= slowdown if level.launches is None else level.launches
    samples, batch = chunk_samples(plan, facts), facts.batch
    chunks = math.ceil(batch / samples) if batch and samples else 1
    return max(gpu, chunks * host)
