"""What a finished trial says about the others: which are not worth a launch, and whose fault."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from autofit.plan import Plan
from autofit.space.order import leaner, only_saves
from autofit.storage import TrialRecord
from autofit.strategies import AS_IS
from autofit.units import parse_size
from autofit.worker.records.trials import Verdict

FRAGMENTED = 0.05
"""Share of the memory lost to fragmentation from which another allocator setting is worth a try."""
WAITING = 0.05
"""Share of a step spent waiting for data from which another way to load it is worth a try."""
UNALLOCATED = re.compile(r"([\d.]+ [KMG]iB) is reserved by PyTorch but unallocated")
"""In the error of torch's CUDA allocator."""


def dominated(plan: Plan, finished: Iterable[TrialRecord], batch: int | None) -> str | None:
    """Return why ``plan`` cannot win, or cannot fit, given what is known; ``None`` if it may.

    ``batch``: samples in a call of the model, as the script has it.
    """
    finished = tuple(finished)
    if plan["micro_batch"] != AS_IS and any(s.leaves_out(level) for s, level in plan):
        return "its batch is split: as many samples at a time need as much memory"
    for trial in finished:
        if (leaner(plan, trial.plan) or only_saves(plan, trial.plan)) and _whole(trial, batch):
            return f"{trial.plan} fits with the whole batch; this would only be slower"
        if trial.verdict is Verdict.OUT_OF_MEMORY and leaner(trial.plan, plan):
            return f"{trial.plan} needs less and does not fit"
    return (
        _needless(plan, finished, batch)
        or _data_is_fast_enough(plan, finished)
        or _too_early(plan, finished)
    )


def most(plan: Plan, finished: Iterable[TrialRecord]) -> float:
    """Return how many samples a part of the batch has at most under ``plan``, by what was measured.

    What is made for one size gets the one that was found without it. What needs more than a plan
    that ran out of memory at a size gets less than that.
    """
    limits = [math.inf]
    for trial in finished if plan["micro_batch"] != AS_IS else ():
        if trial.measurement is None or trial.report is None:
            continue
        found, short = trial.measurement.micro_batch, trial.report.out_of_memory
        larger = (short.micro_batch if short else None) or 0
        for same, keeps in ((plan, 1.0), (plan.unsized, plan.sized_keeps)):
            if found < larger and leaner(trial.plan, same):
                limits.append((larger - 1) / keeps)
        if trial.plan == plan.unsized != plan and not trial.report.reason:  # it was not cut short
            limits.append(found / plan.sized_keeps)
    return min(limits)


def _too_early(plan: Plan, finished: Sequence[TrialRecord]) -> str | None:
    """Return why what is made for one size of batch has to wait, or has no size.

    The same plan without it finds the size, and shows what there is to gain from.
    """
    unsized = plan.unsized
    if waits_for_unsized(plan, finished):
        return f"{unsized} comes first"
    twin = next((trial for trial in finished if trial.plan == unsized != plan), None)
    if twin is None or twin.verdict is Verdict.MEASURED:
        return None
    if twin.verdict is Verdict.OUT_OF_MEMORY and plan.sized_keeps < 1.0:
        return None if plan["micro_batch"] == AS_IS else f"{unsized} fits at no size"
    return f"{unsized} could not be measured"


def waits_for_unsized(plan: Plan, finished: Sequence[TrialRecord]) -> bool:
    """Return whether ``plan`` has to wait for the same one without what is made for one size."""
    return plan.unsized != plan and all(trial.plan != plan.unsized for trial in finished)


def _needless(plan: Plan, finished: Sequence[TrialRecord], batch: int | None) -> str | None:
    """Return why another setting of the allocator would gain nothing, or cannot be known yet.

    It costs a launch of its own, so it is tried where the same plan without it has shown that
    memory was short and that fragmentation lost a part of it.
    """
    if plan["allocator"] == AS_IS:
        return None
    plain = plan.replace(allocator=AS_IS)
    trial = next((each for each in finished if each.plan == plain), None)
    if trial is None:
        return f"{plain} comes first"
    if _whole(trial, batch):
        return f"{plain} fits with the whole batch"
    if fragmentation(trial) < FRAGMENTED:
        return f"{plain} loses next to nothing to fragmentation"
    return None


def _data_is_fast_enough(plan: Plan, finished: Sequence[TrialRecord]) -> str | None:
    """Return why another way to load the data would gain nothing, or cannot be known yet."""
    if plan["data_loading"] == AS_IS:
        return None
    plain = plan.replace(data_loading=AS_IS)
    trial = next((each for each in finished if each.plan == plain), None)
    if trial is None:
        return f"{plain} comes first"
    if trial.measurement is None:
        return f"{plain} could not be measured"
    if trial.measurement.data_wait < WAITING:
        return f"{plain} waits for data less than {WAITING:.0%} of the time"
    return None


def fragmentation(trial: TrialRecord) -> float:
    """Return the share of the memory that the allocator held and could not use.

    When it ran out, if it did, under the plan or at a larger size; else at its peak.
    """
    short = trial.report.out_of_memory if trial.report else None
    if short is not None and (found := UNALLOCATED.search(short.message)):
        return parse_size(found[1].replace(" ", "")) / trial.budget
    measured = trial.measurement
    if measured is None or not measured.peak_reserved:
        return 0.0
    return 1.0 - measured.peak_allocated / measured.peak_reserved


def _whole(trial: TrialRecord, batch: int | None) -> bool:
    """Whether a trial was measured with ease, and its winner runs the batch in one piece."""
    measurement = trial.measurement
    if trial.verdict is not Verdict.MEASURED or measurement is None or measurement.strained:
        return False
    return trial.plan["micro_batch"] == AS_IS or measurement.micro_batch == batch
