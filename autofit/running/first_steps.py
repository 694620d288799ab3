"""What a run says after its first steps: its speed and peak, beside those of the search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autofit.units import format_size
from autofit.worker.launch.guard import SLACK
from autofit.worker.records.trials import FirstSteps, Measurement

MORE = 0.1
"""A run that is slower or larger by more than this share says why."""
EXPLAINS = 0.5
"""A wait is the cause if it takes at least this share of the time by which a step is too long."""


def compared(found: FirstSteps, searched: Measurement, *, peak: bool, shrunk: bool) -> str:
    """Return the line on the first steps of a run.

    Args:
        found: What the run measured.
        searched: What the search measured under the same plan.
        peak: Whether the two peaks count the same memory.
        shrunk: Whether the run has made its chunks smaller, because memory ran short.
    """
    now = replace(
        searched,
        step_seconds=found.step_seconds,
        effective_batch=found.effective_batch or searched.effective_batch,
        peak_device=found.peak_device,
        probed=False,
    )
    fastest = now.samples_per_second + now.samples_per_second_spread
    slowest = searched.samples_per_second - searched.samples_per_second_spread
    slow = fastest < (1 - MORE) * slowest
    large = peak and now.peak_device > (1 + MORE) * searched.peak_device
    sizes = [format_size(each.peak_device) for each in (now, searched)] if peak else []
    line = (
        f"after {found.steps} steps: {' in '.join([f'{speed(now)} samples/s', *sizes[:1]])}"
        f" ({' and '.join([f'{speed(searched)} ±{_spread(searched)}', *sizes[1:]])} in the search)"
    )
    worse = []
    if slow:
        worse.append(f"{_percent(1 - now.samples_per_second / searched.samples_per_second)} slower")
    if large:
        worse.append(f"{_percent(now.peak_device / searched.peak_device - 1)} larger")
    if not worse:
        return line
    causes = list(_waits(found, now, searched)) if slow else []
    causes += _differences(found, now, searched, crowded=slow and not causes, shrunk=shrunk)
    return f"{line}; {' and '.join(worse)}: {', '.join(causes) or 'no cause was found'}"


def speed(measurement: Measurement) -> str:
    """Return samples per second: ``"481.2"``, ``"0.312"``."""
    found = measurement.samples_per_second
    return f"{found:.{1 if found >= 9.95 else 3}f}"


def _waits(found: FirstSteps, now: Measurement, searched: Measurement) -> Iterator[str]:
    """Yield the waits that explain why a step takes longer than in the search."""
    expected = searched.seconds * now.effective_batch / searched.effective_batch
    least = EXPLAINS * (now.seconds - expected)
    if found.data_wait * now.seconds - searched.data_wait * searched.seconds >= least:
        before = _percent(searched.data_wait)
        yield f"it waits for data {_percent(found.data_wait)} of the time, not {before}"
    if found.compiling * now.seconds >= least:
        yield f"it compiles {_percent(found.compiling)} of the time"
    if found.cpu_wait * now.seconds >= least:
        yield f"it waits for a free CPU {_percent(found.cpu_wait)} of the time"


def _differences(
    found: FirstSteps, now: Measurement, searched: Measurement, *, crowded: bool, shrunk: bool
) -> Iterator[str]:
    """Yield what differs from the search; ``crowded``: if other processes may be the cause."""
    if crowded and found.others > SLACK:
        yield f"other processes hold {format_size(found.others)} of the device"
    if now.effective_batch != searched.effective_batch:
        yield f"a step has {now.effective_batch} samples, not {searched.effective_batch}"
    if shrunk:
        yield "memory ran short, and it trains in smaller chunks"


def _spread(measurement: Measurement) -> str:
    digits = len(speed(measurement).partition(".")[2])
    return f"{measurement.samples_per_second_spread:.{digits}f}"


def _percent(share: float) -> str:
    return f"{round(share * 100)} %"
