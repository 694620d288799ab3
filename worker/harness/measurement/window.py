"""What is measured of one plan at one size. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce

from autofit.exceptions import Refused
from autofit.facts import Facts
from autofit.plan import Plan
from autofit.strategies.base import AS_IS
from autofit.units import format_size
from autofit.worker.harness.parent.agreement import Figures
from autofit.worker.meter import Meter, Peak
from autofit.worker.oom import classifier
from autofit.worker.records.trials import Measurement, OutOfMemory

PRESSED = "the allocator empties its cache in step after step"
WARM_UP = 1
"""Steps dropped after every change: allocations, caches and optimizer state settle in them."""
SETTLING = 8
"""Steps that may be dropped for compiling or proving in them; where every step does, it counts."""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step."""

    seconds: float
    wait: float
    """Seconds spent waiting for data."""
    loss: float
    retried: bool
    """The allocator emptied its cache in it, on this rank."""


class Refusals:
    """Counts the allocations that were refused and done without: a proof knows of its own."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._known = 0

    def count(self) -> int:
        """Return how many there were by now."""
        return self._meter.refused() - self._known

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Count none of those within it."""
        before = self.count()
        try:
            yield
        finally:
            self._known += self.count() - before


@dataclass
class Stage:
    """One plan at one micro-batch size, measured over a window of steps."""

    plan: Plan
    steps: int
    compiled: float = 0.0
    """Seconds spent compiling before the stage."""
    refused: int = 0
    """Allocations refused before it, by ``Refusals``."""
    dropped: int = 0
    """Steps that do not count."""
    warm: int = 0
    """Of them, those since the last proof."""
    window: list[Step] = field(default_factory=list)
    """The steps that count."""
    traced: list[tuple[Step, Peak]] = field(default_factory=list)
    """Traced steps and their peaks, which count where there are few others."""
    peak: Peak = field(default_factory=lambda: Peak(0, 0, 0))
    """Of traced steps that count."""
    pressed: bool = False
    """The allocator emptied its cache in two steps on end, on a rank: known once it is measured."""
    shortage: OutOfMemory | None = None
    refusal: Refused | None = None

    def measurement(
        self, ranks: Sequence[Figures], facts: Facts, share: float = 1.0
    ) -> Measurement:
        """Return what was measured.

        ``ranks``: the figures of each, as they are now. ``share``: mean part of the largest
        rank's batch that a rank has.
        """
        self.pressed = any(each.pressed for each in ranks)
        peak = reduce(Peak.worst, (each.peak for each in ranks))
        size = self.plan["micro_batch"]
        return Measurement(
            micro_batch=self.plan.samples(facts.batch or 1) if size == AS_IS else int(size),
            effective_batch=max(1, round(self.plan.effective_batch(facts) * share)),
            step_seconds=tuple(self.seconds),
            peak_allocated=peak.allocated,
            peak_reserved=peak.reserved,
            peak_device=peak.device,
            allocation_retries=max(each.retries for each in ranks),
            allocations_refused=max(each.refused for each in ranks),
            data_wait=sum(step.wait for step in self.window) / sum(self.seconds),
            losses=tuple(step.loss for step in self.window),
            compile_seconds=max(each.compiled for each in ranks),
            rank_peaks=tuple(each.peak.device for each in ranks) if len(ranks) > 1 else (),
        )

    @property
    def cold(self) -> bool:
        """Whether the next step is one of the first after a change."""
        return self.warm < WARM_UP

    def settles(self, changed: bool) -> bool:
        """Return whether a step does not count for what was proven or compiled in it."""
        return changed and self.dropped < SETTLING

    def drop(self, *, anew: bool) -> None:
        """Count no step that has ended; ``anew``: it was proven in, and others warm up after it."""
        self.dropped += 1
        self.warm = 0 if anew else self.warm + 1

    @property
    def seconds(self) -> list[float]:
        """Of each step that counts."""
        return [step.seconds for step in self.window]

    @property
    def size(self) -> int | None:
        """The samples at a time; ``None`` where the batch is not split."""
        size = self.plan["micro_batch"]
        return None if size == AS_IS else int(size)

    def smaller(
        self, plan: Plan, measured: Sequence[tuple[Plan, Measurement]]
    ) -> list[tuple[Plan, Measurement]]:
        """Return what was measured of ``plan`` with fewer samples at a time, the fastest last."""
        own = [
            pair for pair in measured if pair[0].replace(micro_batch=plan["micro_batch"]) == plan
        ]
        smaller = [pair for pair in own if pair[1].micro_batch < (self.size or 0)]
        return sorted(smaller, key=lambda pair: pair[1].seconds, reverse=True)

    def figures(self, peak: Peak, compiled: float, refused: int) -> Figures:
        """Return this rank's; ``compiled``, ``refused``: as in the fields, by now."""
        return Figures(
            peak=peak.worst(self.peak),
            retries=sum(step.retried for step in self.window),
            refused=refused - self.refused,
            compiled=compiled - self.compiled,
            pressed=classifier.pressed(step.retried for step in self.window),
        )

    def does_not_hold(self, measurement: Measurement, budget: int) -> OutOfMemory | None:
        """Return why a run would not stay at this size, though no allocation has failed.

        More on the device than the cap on torch's allocator can see (the context, libraries); or
        the allocator emptying its cache on end, at which a real run cuts the batch smaller too.
        """
        excess = measurement.peak_device - budget
        message, asked = "", None
        if excess > 0:
            message = f"{format_size(excess)} more on the device than the budget"
            asked = excess
        elif self.pressed and self.plan["micro_batch"] != AS_IS and measurement.micro_batch > 1:
            lost = format_size(measurement.peak_reserved - measurement.peak_allocated)
            message = f"{PRESSED}; {lost} is reserved by PyTorch but unallocated"
        if not message:
            return None
        return OutOfMemory(
            phase="the whole step",
            message=message,
            requested=asked,
            micro_batch=measurement.micro_batch,
        )

    def keep_traced(self, step: Step, peak: Peak) -> None:
        """Keep a traced step, but for the first."""
        if self.dropped > 1:
            self.traced.append((step, peak))

    def traced_for(self, seconds: float) -> bool:
        """Return whether the traced steps kept so far took as long as that."""
        return sum(step.seconds for step, _ in self.traced) >= seconds

    def count_traced(self) -> None:
        """Count the traced steps too: the script has too few others."""
        self.window[:0] = [step for step, _ in self.traced]
        self.peak = reduce(Peak.worst, (peak for _, peak in self.traced), self.peak)
        self.traced.clear()


def tighter(before: OutOfMemory | None, now: OutOfMemory) -> OutOfMemory:
    """Return which of two shortages of a plan says more: that of a smaller size, else the later."""
    sizes = before.micro_batch if before else None, now.micro_batch
    smaller = sizes[0] is not None and sizes[1] is not None and sizes[0] < sizes[1]
    return before if before is not None and smaller else now
