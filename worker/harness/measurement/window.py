"""A window: the optimizer steps over which one plan is measured at one size. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce

from autofit.exceptions import Refused
from autofit.facts import Facts
from autofit.plan import Plan
from autofit.strategies.support.block_levels import more_blocks
from autofit.units import format_size
from autofit.worker.harness.parent.agreement import Figures, Seen
from autofit.worker.meter import Meter, Peak
from autofit.worker.oom import classifier
from autofit.worker.records.trials import Measurement, OutOfMemory

LONG = 8.0
"""Seconds of measured steps after which a window ends early."""
PRESSED = "the allocator empties its cache in step after step"
WARM_UP = 1
"""Steps dropped after every change, while caches and the optimizer's state are filled."""
SETTLING = 8
"""At most so many steps are dropped for a check or a compilation. If every step compiles, steps
count from then on."""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step."""

    seconds: float
    wait: float
    """Seconds spent waiting for data."""
    loss: float
    retried: bool
    """The allocator emptied its cache during the step, on this rank."""


class RefusedAllocations:
    """Counts refused allocations, without those inside a check: they are part of its search."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._known = 0

    def count(self) -> int:
        """Return how many allocations were refused so far."""
        return self._meter.refused() - self._known

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Do not count the allocations that are refused within this context."""
        before = self.count()
        try:
            yield
        finally:
            self._known += self.count() - before


@dataclass
class Window:
    """One plan at one micro-batch size, measured over some optimizer steps."""

    plan: Plan
    steps: int
    compiled: float = 0.0
    """Seconds spent compiling before the window."""
    refused: int = 0
    """Allocations refused before the window."""
    dropped: int = 0
    """Steps that did not count."""
    warm: int = 0
    """Steps dropped since the last check."""
    counted: list[Step] = field(default_factory=list)
    """The steps that count."""
    traced: list[tuple[Step, Peak]] = field(default_factory=list)
    """Traced steps and their peaks. They count only if the script has too few other steps."""
    peak: Peak = field(default_factory=lambda: Peak(0, 0, 0))
    """The peak of the traced steps that count."""
    pressed: bool = False
    """The allocator of a rank emptied its cache in two steps in a row; set by ``measurement``."""
    shortage: OutOfMemory | None = None
    """Memory ran out, on this rank or on another, which ends the window."""
    refusal: Refused | None = None
    """The plan was refused, which ends the window."""
    check: bool = False
    """The plan is verified in the first step, which is then the only one."""

    def measurement(
        self, ranks: Sequence[Figures], facts: Facts, share: float = 1.0
    ) -> Measurement:
        """Return the measurement of all ranks.

        ``ranks``: the current figures of each rank. ``share``: the mean batch of a rank, relative
        to the largest rank's batch.
        """
        self.pressed = any(each.pressed for each in ranks)
        peak = reduce(Peak.worst, (each.peak for each in ranks))
        return Measurement(
            micro_batch=self.plan.chunk or self.plan.samples(facts.batch or 1),
            effective_batch=max(1, round(self.plan.effective_batch(facts) * share)),
            step_seconds=tuple(self.seconds),
            peak_allocated=peak.allocated,
            peak_reserved=peak.reserved,
            peak_device=peak.device,
            allocation_retries=max(each.retries for each in ranks),
            allocations_refused=max(each.refused for each in ranks),
            data_wait=sum(step.wait for step in self.counted) / sum(self.seconds),
            losses=tuple(step.loss for step in self.counted),
            compile_seconds=max(each.compiled for each in ranks),
            rank_peaks=tuple(each.peak.device for each in ranks) if len(ranks) > 1 else (),
            checkpointing=self.plan.blocks,
        )

    @property
    def full(self) -> bool:
        """Whether the window ends: it has its steps, they took ``LONG``, or memory ran out."""
        enough = len(self.counted) >= self.steps or sum(self.seconds) >= LONG
        return enough or self.shortage is not None

    def add(self, step: Step, seen: Seen, traced: Peak | None, *, last_traced: bool) -> bool:
        """Count a step, or drop it; return whether it counts.

        ``seen``: the step on all ranks. ``traced``: the peak of a traced step. ``last_traced``: no
        other step is traced, and the traced ones are as long as any.
        """
        settling = (seen.proven or seen.compiled) and self.dropped < SETTLING
        if self.check or not (traced or settling or self.warm < WARM_UP):
            self.counted.append(step)
            return True
        self.dropped += 1
        # The warm-up starts again after a check.
        self.warm = 0 if seen.proven and settling else self.warm + 1
        if traced is not None and not settling:
            if self.dropped > 1:  # the first step is longer
                self.traced.append((step, traced))
            if last_traced and sum(step.seconds for step, _ in self.traced) >= LONG:
                self.count_traced()
        return False

    @property
    def seconds(self) -> list[float]:
        """The duration of each step that counts."""
        return [step.seconds for step in self.counted]

    def leaner(
        self, plan: Plan, measured: Sequence[tuple[Plan, Measurement]]
    ) -> list[tuple[Plan, Measurement]]:
        """Return the measurements of ``plan`` that need less memory than this, the fastest last."""
        own = [pair for pair in measured if pair[0].is_point_of(plan)]
        leaner = [pair for pair in own if pair[1].leaner(self.plan.chunk, self.plan.blocks)]
        return sorted(leaner, key=lambda pair: pair[1].seconds, reverse=True)

    def figures(self, peak: Peak, compiled: float, refused: int) -> Figures:
        """Return the figures of this rank.

        ``compiled``, ``refused``: the totals up to now, as in the fields of the same names.
        """
        return Figures(
            peak=peak.worst(self.peak),
            retries=sum(step.retried for step in self.counted),
            refused=refused - self.refused,
            compiled=compiled - self.compiled,
            pressed=classifier.pressed(step.retried for step in self.counted),
        )

    def does_not_hold(self, measurement: Measurement, budget: int) -> OutOfMemory | None:
        """Return why a real run could not stay at this size, though no allocation has failed.

        There are two reasons. The device may hold more than the cap on torch's allocator covers:
        the CUDA context and libraries. Or the allocator empties its cache in step after step, and a
        real run would then halve its chunks.
        """
        excess = measurement.peak_device - budget
        message, asked = "", None
        if excess > 0:
            message = f"{format_size(excess)} more on the device than the budget"
            asked = excess
        elif self.pressed and self.plan.splits and measurement.micro_batch > 1:
            lost = format_size(measurement.peak_reserved - measurement.peak_allocated)
            message = f"{PRESSED}; {lost} is reserved by PyTorch but unallocated"
        if not message:
            return None
        return OutOfMemory(
            phase="the whole step",
            message=message,
            requested=asked,
            micro_batch=measurement.micro_batch,
            checkpointing=measurement.checkpointing,
        )

    def count_traced(self) -> None:
        """Count the traced steps too, because the script has too few others."""
        self.counted[:0] = [step for step, _ in self.traced]
        self.peak = reduce(Peak.worst, (peak for _, peak in self.traced), self.peak)
        self.traced.clear()


def joined(windows: Sequence[Measurement]) -> Measurement:
    """Return the measurement of several windows of one plan: all steps, and the highest peak."""
    first, *_ = windows
    return replace(
        first,
        step_seconds=tuple(each for window in windows for each in window.step_seconds),
        losses=tuple(each for window in windows for each in window.losses),
        peak_allocated=max(each.peak_allocated for each in windows),
        peak_reserved=max(each.peak_reserved for each in windows),
        peak_device=max(each.peak_device for each in windows),
        allocation_retries=sum(each.allocation_retries for each in windows),
        allocations_refused=max(each.allocations_refused for each in windows),
        compile_seconds=sum(each.compile_seconds for each in windows),
    )


def leaner_shortage(before: OutOfMemory | None, now: OutOfMemory) -> OutOfMemory:
    """Return the more informative shortage: smaller chunks, else more blocks, else ``now``."""
    if before is None:
        return now
    sizes = before.micro_batch, now.micro_batch
    smaller = sizes[0] is not None and sizes[1] is not None and sizes[0] < sizes[1]
    more = sizes[0] == sizes[1] and more_blocks(before.checkpointing, now.checkpointing)
    return before if smaller or more else now
