"""What a finished trial says about the others: which are not worth a launch, and whose fault."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autofit import strategies
from autofit.plan import Plan
from autofit.space.catalogue import by_cost
from autofit.space.order import leaner
from autofit.storage import TrialRecord
from autofit.strategies import AS_IS, Facts, Fidelity
from autofit.units import parse_size
from autofit.worker.records.trials import CHECK, TrialReport, Verdict

BLAMED = (Verdict.REFUSED, Verdict.PLAN_FAILED, Verdict.DRIFTED)
"""Verdicts that rule a level out, where it is known which."""
FRAGMENTED = 0.05
"""Share of the memory lost to fragmentation from which another allocator setting is worth a try."""
WAITING = 0.05
"""Share of a step spent waiting for data from which another way to load it is worth a try."""
PHASES = ("outside the model", CHECK, "forward", "backward", "optimizer step", "the whole step")
"""Of a step, in their order."""
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
        if (leaner(plan, trial.plan) or _only_saves(plan, trial.plan)) and _whole(trial, batch):
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


def _only_saves(plan: Plan, than: Plan) -> bool:
    """Return whether ``plan`` differs by levels that refine, none expected to gain speed."""
    known = [(strategies.get(name), level) for name, level in plan.levels.items()]
    found = [(s.level(level), s.level(than[s.name])) for s, level in known if level != than[s.name]]
    return bool(found) and all(
        new.refines and new.slowdown >= max(1.0, old.slowdown) for new, old in found
    )


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


def judged(report: TrialReport, baseline: Verdict | None) -> TrialReport:
    """Return the report with the fault of a failure where it belongs.

    ``baseline``: how the neutral plan ended, if it has. A plan that fails where the neutral one
    was measured is to blame. Where the neutral one ran out of memory it cannot decide; an error
    that the script's own line raised, with no strategy on the stack, is then the script's.
    """
    if report.verdict is not Verdict.PLAN_FAILED or baseline is Verdict.MEASURED:
        return report
    if report.own and report.blamed is None:
        return replace(report, verdict=Verdict.SCRIPT_FAILED)
    return report


def within(report: TrialReport, facts: Facts | None, allow: Fidelity) -> TrialReport:
    """Return the report as refused where a level has turned out to change more than is allowed.

    What a model draws by hand, say, shows in the proof of how its batch is split.
    """
    beyond = [(s, s.fidelity(level, facts)) for s, level in report.plan]
    beyond = [(strategy, fidelity) for strategy, fidelity in beyond if fidelity > allow]
    if report.verdict is not Verdict.MEASURED or not beyond:
        return report
    strategy, fidelity = beyond[0]
    return replace(
        report,
        verdict=Verdict.REFUSED,
        reason=f"{fidelity}, and only {allow} is allowed",
        blamed=strategy.name,
        best=None,
        measurements=(),
    )


def culprit(report: TrialReport, finished: Iterable[TrialRecord] = ()) -> tuple[str, str] | None:
    """Return the strategy and level that a trial rules out by its end, if it is one.

    The one blamed, the only one, or the only one besides a plan that was measured; where training
    drifted, one whose own was compared with the reference's and found to be the same.
    """
    plan = report.plan.searched
    if report.blamed is not None:
        return report.blamed, plan[report.blamed]
    changed = set(plan.changes)
    if report.verdict in (Verdict.DRIFTED, Verdict.PLAN_FAILED):
        drifted = report.verdict is Verdict.DRIFTED
        good = (trial for trial in finished if _went_well(trial, compared=drifted))
        suspects = [changed - set(trial.plan.searched.changes) for trial in good]
        changed = min(suspects, key=len, default=changed) or changed
    changed = _suspected(changed)
    return changed.pop() if len(changed) == 1 else None


def _suspected(changed: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the levels without those that stand in every plan, in the place of ``as_is``."""
    return {each for each in changed if not strategies.get(each[0]).level(each[1]).instead} or (
        changed
    )


def refused(finished: Iterable[TrialRecord]) -> list[TrialReport]:
    """Return the reports of the plans that could not keep their promise."""
    found = (trial.report for trial in finished if trial.verdict is Verdict.REFUSED)
    return [report for report in found if report is not None]


def tainted(plan: Plan, ended: Iterable[TrialReport], finished: Sequence[TrialRecord]) -> bool:
    """Return whether ``plan`` holds what made another drift, or be refused.

    ``ended``: the reports of those. The level that did it, or all of them together. In a plan that
    drifted, the size of a part of the batch aside, which is found anew for each plan.
    """
    for report in ended:
        found = culprit(report, finished)
        levels = dict([found] if found else _suspected(set(report.plan.searched.changes)))
        if len(levels) > 1 and report.verdict is Verdict.DRIFTED:
            levels.pop("micro_batch", None)
        if levels and levels.items() <= plan.searched.levels.items():
            return True
    return False


def _went_well(trial: TrialRecord, *, compared: bool) -> bool:
    first = trial.report is not None and trial.report.index == 0
    return trial.verdict is Verdict.MEASURED and (first or not compared)


def closest(finished: Iterable[TrialRecord]) -> TrialRecord | None:
    """Return the trial that came furthest before it ran out of memory; of several, the leanest.

    One whose process had taken a step had the optimizer's state to hold as well, whichever part of
    a later step it came to; within a step, the later part is the further.
    """
    short = [trial for trial in finished if trial.verdict is Verdict.OUT_OF_MEMORY]
    return max(short, key=lambda trial: (_reached(trial), by_cost(trial.plan)), default=None)


def _reached(trial: TrialRecord) -> tuple[bool, int]:
    """Return whether a trial came past its first step, and how far into one.

    The bytes it asked for last say nothing of it.
    """
    shortage = trial.report.out_of_memory if trial.report else None
    if shortage is None:
        return False, -1
    into = PHASES.index(shortage.phase) if shortage.phase in PHASES else -1
    return bool(shortage.steps) or shortage.phase == PHASES[-1], into
