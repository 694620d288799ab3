"""Measures the first optimizer steps of a real run; waits for the device at the two ends only."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from autofit.facts import Facts, RootFacts
from autofit.host import read
from autofit.plan import Plan
from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.patching.observers import Seams
from autofit.worker.harness.torch_state.compile_state import CompileClock
from autofit.worker.harness.torch_state.guarded import beside
from autofit.worker.harness.verification.split_check import (
    batch_dimension_uncertain,
    batched_arguments,
)
from autofit.worker.meter import Meter, accelerator
from autofit.worker.records.trials import FirstSteps

STEPS = 20
"""Steps after which a run reports what it measured."""
WARM_UP = 3
"""Steps of them that are not measured: caches fill, kernels are chosen, the plan compiles."""
_THREADS = "/proc/self/task"


@dataclass(frozen=True, slots=True)
class _Totals:
    """What the process has spent so far, in seconds."""

    wall: float
    data: float
    compiling: float
    waits: dict[str, float]
    """By thread: how long it was ready to run without a CPU."""


class FirstStepsMeter:
    """Measures a run's steps under ``plan``, from the end of step ``WARM_UP`` to ``STEPS``.

    In between it notes a moment a step.
    """

    def __init__(self, plan: Plan, meter: Meter, seams: Seams) -> None:
        self.plan = plan
        self._meter = meter
        self._seams = seams
        self._compiling = CompileClock()
        self._steps = 0
        self._calls: list[int | None] = []
        """Samples of each call since the last step; ``None`` if unknown."""
        self._samples: list[int] = []
        """Samples of each measured step, as far as known."""
        self._ends: list[accelerator.Moment] = []
        """When each step has ended, from step ``WARM_UP`` on."""
        self._before: _Totals | None = None

    def called(self, facts: RootFacts, args: Any, kwargs: Any) -> None:
        """Count the samples of a call of the first root."""
        lost = "the samples of a call cannot be counted"
        self._calls.append(beside(lambda: _samples(facts, args, kwargs), None, lost))

    def stepped(self, facts: Facts) -> FirstSteps | None:
        """Note a step of the optimizer; return the figures after the last one to measure.

        ``facts``: those of the script; their samples are replaced by those that were counted.
        """
        self._steps += 1
        calls, self._calls = self._calls, []
        if self._steps < WARM_UP:
            return None
        if self._before is None:
            self._meter.synchronize()
            self._ends.append(accelerator.Moment())
            self._before = self._totals()
            return None
        self._ends.append(accelerator.Moment())
        known = [each for each in calls if each is not None]
        if calls and len(known) == len(calls):
            self._samples.append(sum(known))
        return self._figures(self._before, facts) if self._steps == STEPS else None

    def _figures(self, before: _Totals, facts: Facts) -> FirstSteps:
        self._meter.synchronize()
        now = self._totals()
        wall = now.wall - before.wall
        waits = (now.waits[each] - before.waits[each] for each in now.waits.keys() & before.waits)
        return FirstSteps(
            steps=self._steps,
            step_seconds=tuple(start.until(end) for start, end in pairwise(self._ends)),
            effective_batch=self._effective_batch(facts),
            peak_device=self._meter.peak().device,
            data_wait=(now.data - before.data) / wall,
            compiling=(now.compiling - before.compiling) / wall,
            cpu_wait=max(waits, default=0.0) / wall,
            others=self._others(),
        )

    def _totals(self) -> _Totals:
        return _Totals(
            wall=time.perf_counter(),
            data=self._seams.data_seconds,
            compiling=self._compiling.seconds(),
            waits=_cpu_waits(),
        )

    def _effective_batch(self, facts: Facts) -> int | None:
        """Return the median samples of a step over all ranks, as the plan counts them."""
        if not self._samples or not facts.roots:
            return None
        root = replace(facts.roots[0], batch=round(median(self._samples)))
        return self.plan.effective_batch(replace(facts, roots=(root,), calls_per_step=1))

    def _others(self) -> int:
        """Return the bytes of the device that other processes hold; 0 on the CPU."""
        available = self._meter.available()
        if available is None:
            return 0
        return max(0, accelerator.free_and_total()[1] - available)


def _samples(facts: RootFacts, args: Any, kwargs: Any) -> int | None:
    """Return the samples of a call; ``None`` if its first dimension may be another than these."""
    batch = Batch.of(args, kwargs)
    batched = batched_arguments(batch, 0)
    if not batched or batch_dimension_uncertain(facts, batch):
        return None
    return int(batch.leaves[batched[0]].shape[0])


def _cpu_waits() -> dict[str, float]:
    """Return how long each thread of this process was ready to run without a CPU, in seconds.

    Linux counts it: https://docs.kernel.org/scheduler/sched-stats.html. Empty if it does not.
    """
    found = {}
    for thread in os.listdir(_THREADS) if os.path.isdir(_THREADS) else ():
        fields = read(Path(_THREADS, thread, "schedstat")).split()
        if len(fields) == 3:
            found[thread] = int(fields[1]) / 1e9
    return found
