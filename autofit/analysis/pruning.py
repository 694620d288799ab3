"""Pruning: which plans are not worth a trial, given the trials that have finished."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from autofit.plan import Plan
from autofit.space.order import leaner, only_saves
from autofit.storage import TrialRecord
from autofit.strategies import AS_IS, AUTO, Number, Waste
from autofit.strategies.support.block_levels import ALL
from autofit.units import parse_size
from autofit.worker.records.trials import Verdict

FRAGMENTED = 0.05
"""Another allocator setting is tried if fragmentation wastes this share of the memory or more."""
MIN_DATA_WAIT = 0.05
"""Another way to load data is tried if waiting for data takes this share of a step or more."""
UNALLOCATED = re.compile(r"([\d.]+ [KMG]iB) is reserved by PyTorch but unallocated")
"""The size of unusable memory, in an error of PyTorch's CUDA allocator."""


def dominated(plan: Plan, finished: Iterable[TrialRecord], batch: int | None) -> str | None:
    """Return why ``plan`` is not worth a trial now; ``None`` if it is.

    A plan is not worth a trial if it cannot win, cannot fit, or must wait for another plan.

    Args:
        plan: The plan to check.
        finished: The finished trials of the search.
        batch: Samples in one call of the model in the script, if known.
    """
    finished = tuple(finished)
    if plan.splits and any(s.drops_samples(level) for s, level in plan):
        return "its batch is split already, so a smaller batch saves no memory"
    for trial in finished:
        if (leaner(plan, trial.plan) or only_saves(plan, trial.plan)) and _fits_whole_batch(
            trial, batch
        ):
            return f"{trial.plan} fits with the whole batch, and this plan is slower"
        if trial.verdict is Verdict.OUT_OF_MEMORY and leaner(trial.plan, plan):
            return f"{trial.plan} needs less memory and does not fit"
        if _includes(trial, plan):
            return f"{trial.plan} includes it"
    return _remedy_is_idle(plan, finished, batch) or _lacks_size(plan, finished)


def max_micro_batch(plan: Plan, finished: Iterable[TrialRecord]) -> float:
    """Return an upper bound on the micro-batch size of ``plan``, from the finished trials.

    If a leaner plan ran out of memory at a size, ``plan`` needs a smaller size. Levels such as
    ``compile`` are made for one size. A plan with them begins at a size that its ``unsized`` plan
    found. The bound does not count a larger size that it finds later. Both bounds grow if such
    levels lower the activations. The bound is infinite if the batch is whole.
    """
    limits = [math.inf]
    for trial in finished if plan.splits else ():
        if trial.measurement is None or trial.report is None:
            continue
        found, short = trial.measurement.micro_batch, trial.report.out_of_memory
        larger = (short.micro_batch if short else None) or 0
        for same, keeps in ((plan, 1.0), (plan.unsized, plan.sized_keeps)):
            if found < larger and leaner(trial.plan, same):
                limits.append((larger - 1) / keeps)
        if trial.plan == plan.unsized != plan and not trial.report.reason:  # its ramp was complete
            limits.append(found / plan.sized_keeps)
    return min(limits)


def _includes(trial: TrialRecord, plan: Plan) -> bool:
    """Return whether a complete trial chose the number of blocks, and ``plan`` has one of these."""
    report = trial.report
    if report is None or plan.blocks not in (AS_IS, ALL):
        return False
    measured = report.verdict is Verdict.MEASURED and not report.reason
    complete = measured or report.verdict is Verdict.OUT_OF_MEMORY
    return complete and plan.with_number(Number.BLOCKS, AUTO) == trial.plan


def _lacks_size(plan: Plan, finished: Sequence[TrialRecord]) -> str | None:
    """Return why a plan made for one batch size has no size yet; ``None`` if it has one.

    The ``unsized`` plan must be measured first: its trial finds the size.
    """
    unsized = plan.unsized
    if waits_for_unsized(plan, finished):
        return f"{unsized} comes first"
    found = (trial for trial in finished if unsized != plan and _finds_size(trial.plan, plan))
    trial = next(found, None)
    if trial is None or trial.verdict is Verdict.MEASURED:
        return None
    if trial.verdict is Verdict.OUT_OF_MEMORY and plan.sized_keeps < 1.0:
        return f"{unsized} fits at no size" if plan.splits else None
    return f"{unsized} could not be measured"


def waits_for_unsized(plan: Plan, finished: Sequence[TrialRecord]) -> bool:
    """Return whether the ``unsized`` plan of ``plan`` must be measured before it."""
    return plan.unsized != plan and not any(_finds_size(trial.plan, plan) for trial in finished)


def _finds_size(plan: Plan, sized: Plan) -> bool:
    """Return whether a trial of ``plan`` finds the numbers of ``sized``; it may checkpoint more."""
    return plan in (sized.unsized, sized.unsized.with_number(Number.BLOCKS, AUTO))


def _remedy_is_idle(plan: Plan, finished: Sequence[TrialRecord], batch: int | None) -> str | None:
    """Return why a level that lowers a waste is not worth a trial; ``None`` if it is.

    An allocator setting, for example, costs a launch of its own. It is tried only if the same plan
    without it was short of memory and lost a part of it to fragmentation.
    """
    for waste in Waste:
        plain = plan.without_remedy(waste)
        if plain == plan:
            continue
        trial = next((each for each in finished if each.plan == plain), None)
        if trial is None:
            return f"{plain} comes first"
        if found := SHOWN[waste](trial, batch):
            return f"{plain} {found}"
    return None


def _no_fragmentation(trial: TrialRecord, batch: int | None) -> str | None:
    """Return why less fragmentation would not help a trial; ``None`` if it may."""
    if _fits_whole_batch(trial, batch):
        return "fits with the whole batch"
    if fragmentation(trial) < FRAGMENTED:
        return f"loses less than {FRAGMENTED:.0%} of the memory to fragmentation"
    return None


def _no_data_wait(trial: TrialRecord, batch: int | None) -> str | None:
    """Return why faster loading would not help a trial; ``None`` if it may."""
    if trial.measurement is None:
        return "could not be measured"
    if trial.measurement.data_wait < MIN_DATA_WAIT:
        return f"waits for data less than {MIN_DATA_WAIT:.0%} of the time"
    return None


SHOWN = {Waste.FRAGMENTATION: _no_fragmentation, Waste.DATA_WAIT: _no_data_wait}
"""For each waste, why a trial shows too little of it."""


def fragmentation(trial: TrialRecord) -> float:
    """Return the share of memory that the allocator held but could not use.

    If the trial ran out of memory, at any size, the share is that of the moment when it did.
    Otherwise it is the share at the peak.
    """
    short = trial.report.out_of_memory if trial.report else None
    if short is not None and (found := UNALLOCATED.search(short.message)):
        return parse_size(found[1].replace(" ", "")) / trial.budget
    measured = trial.measurement
    if measured is None or not measured.peak_reserved:
        return 0.0
    return 1.0 - measured.peak_allocated / measured.peak_reserved


def _fits_whole_batch(trial: TrialRecord, batch: int | None) -> bool:
    """Return whether a trial fits well and its winner runs the whole batch at once."""
    measurement = trial.measurement
    if trial.verdict is not Verdict.MEASURED or measurement is None or measurement.strained:
        return False
    return not trial.plan.splits or measurement.micro_batch == batch
