"""What a trial's report means: the only module that judges.

A verdict forms in four steps. ``within`` refuses a plan that changes more than is allowed.
``compared`` tells whether the plan trains what the reference trains. ``judged`` finds whose fault a
failure is. ``corrected`` takes the confirmation run into account. ``culprit`` and ``tainted`` then
say which other plans the verdict rules out. All are pure functions of records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autofit import strategies
from autofit.equivalence.compare import compare, divergence, finite
from autofit.plan import Plan
from autofit.space.order import by_cost
from autofit.storage import TrialRecord
from autofit.strategies import SPLIT, Facts, Fidelity
from autofit.worker.records.phases import added
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import CHECK, Measurement, OutOfMemory, TrialReport, Verdict

BLAMED = (Verdict.REFUSED, Verdict.PLAN_FAILED, Verdict.DRIFTED)
"""Verdicts that rule out a level, if the level at fault is known."""


OUTSIDE = "outside the model"
PHASES = (OUTSIDE, CHECK, "forward", "backward", "optimizer step", "the whole step")
"""The phases of a step, in their order."""


TIE = 0.03
"""Speeds that differ by this share or less count as equal. Launches of one plan differ as much."""
NOISY = 0.05
"""Variation from which a summary says that the figures are noisy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTraining:
    """What the reference trained, as far as it is known."""

    plan: Plan
    trace: Trace | None = None
    """Its first steps; ``None`` while there is no reference."""
    losses: tuple[float, ...] = ()
    """Losses of all its steps, the longest run of it."""
    repeats: bool | None = None
    """Whether a second run did the same; ``None`` before there was one."""


NOT_FINITE = "a loss that is not finite"
"""Why a plan has drifted if there is no reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What ``compared`` found."""

    report: TrialReport
    """The report, as ``drifted`` if the training differs."""
    obstacle: str = ""
    """Why the steps were not compared."""
    without_reference: bool = False
    """There was nothing to compare the steps with."""


def compared(
    report: TrialReport, trace: Trace | None, expected: ExpectedTraining, facts: Facts | None
) -> Compared:
    """Compare the training of a measured plan with the reference's.

    ``trace`` holds the first steps of a plan that came first in its process. Without one, only the
    losses are compared.
    """
    if report.verdict is not Verdict.MEASURED:
        return Compared(report=report)
    found = _steps_compared(report, trace, expected, facts)
    if found.report is not report:  # its first steps have drifted
        return found
    reason = _divergence(report, expected, facts)
    if reason is None:
        return found
    return replace(found, report=_drifted(report, reason))


def _steps_compared(
    report: TrialReport, trace: Trace | None, expected: ExpectedTraining, facts: Facts | None
) -> Compared:
    """Compare the first steps of a measured plan, if it promises those of the reference."""
    fidelity = report.plan.fidelity(facts)
    if trace is None or report.plan.neutral or fidelity >= Fidelity.RECIPE:
        return Compared(report=report)
    if expected.trace is None:
        return Compared(report=report, without_reference=True)
    if expected.repeats is False:
        return Compared(report=report)
    splits = report.plan.divides or expected.plan.divides
    steps = compare(trace, expected.trace, fidelity, splits=splits)
    if steps.drifted is not None:
        return Compared(report=_drifted(report, steps.drifted))
    return Compared(report=report, obstacle=(steps.obstacle or "") if steps.steps == 0 else "")


def _divergence(report: TrialReport, expected: ExpectedTraining, facts: Facts | None) -> str | None:
    """Return how the losses differ. Without a reference, a plan that does not round is one."""
    losses = losses_of(report)
    if expected.trace is not None:
        return divergence(losses, expected.losses)
    exact = report.plan.fidelity(facts) < Fidelity.ROUNDING
    return None if exact or finite(losses) else NOT_FINITE


def within(report: TrialReport, facts: Facts | None, allow: Fidelity) -> TrialReport:
    """Return the report as ``refused`` if a level of its plan exceeds the allowed fidelity.

    The fidelity of a level can depend on facts that only the trial revealed. For example, the check
    of a split batch reveals that the model draws its own random numbers.
    """
    found = [(s, s.fidelity(level, facts)) for s, level in report.plan]
    excessive = [(strategy, fidelity) for strategy, fidelity in found if fidelity > allow]
    if report.verdict is not Verdict.MEASURED or not excessive:
        return report
    strategy, fidelity = excessive[0]
    return replace(
        report,
        verdict=Verdict.REFUSED,
        reason=f"{fidelity}, and only {allow} is allowed",
        blamed=strategy.name,
        best=None,
        measurements=(),
    )


def _drifted(report: TrialReport, reason: str) -> TrialReport:
    return replace(report, verdict=Verdict.DRIFTED, reason=reason)


def losses_of(report: TrialReport | None) -> list[float]:
    """Return the loss of each step that a trial measured."""
    if report is None:
        return []
    return [loss for each in report.measurements for loss in each.losses]


def judged(report: TrialReport, baseline: Verdict | None) -> TrialReport:
    """Return the report as ``script_failed`` if its failure is the script's own fault.

    If the neutral plan was measured, the plan is at fault. Otherwise the script is at fault if its
    own code raised the error and no strategy's code was on the stack.

    Args:
        report: The report of a trial.
        baseline: The verdict of the neutral plan; ``None`` before it has one.
    """
    if report.verdict is not Verdict.PLAN_FAILED or baseline is Verdict.MEASURED:
        return report
    if report.own and report.blamed is None:
        return replace(report, verdict=Verdict.SCRIPT_FAILED)
    return report


def best_plan(trial: TrialRecord) -> Plan:
    """Return the plan of a trial, with the micro-batch size that won if it was measured."""
    return (trial.report.best if trial.report else None) or trial.plan


def solved(plan: Plan) -> bool:
    """Return whether a trial measures ``plan`` itself with several numbers in place of ``auto``.

    A plan with levels that are made for one batch size finds its numbers without these levels.
    """
    return plan.open and plan.unsized == plan


def fits(trial: TrialRecord, budget: int) -> bool:
    """Return whether a trial was measured within ``budget`` bytes of device memory."""
    measurement = trial.measurement
    measured = trial.verdict is Verdict.MEASURED and measurement is not None
    return measured and measurement is not None and measurement.peak_device <= budget


def corrected(trial: TrialRecord, again: Sequence[TrialRecord], budget: int) -> TrialRecord:
    """Return a trial with the result of its confirmation run, if that one was short of memory.

    If the plan barely fitted and was slower, the confirmation's measurement replaces the search's.
    If the plan ran out of memory, the trial counts with the fastest of its measurements in smaller
    chunks or with more checkpointed blocks. Without one, its verdict becomes ``OUT_OF_MEMORY``.

    Args:
        trial: A trial of the search.
        again: The confirmation runs of the study.
        budget: Bytes of a device.
    """
    while trial.report is not None and (first := trial.measurement) is not None:
        mine = [each for each in again if each.plan == best_plan(trial)]
        if held := [each.measurement for each in mine if fits(each, budget)]:
            return _slower(trial, first, held[-1])
        short = [e.report.out_of_memory for e in mine if e.report and e.report.out_of_memory]
        if trial.verdict is not Verdict.MEASURED or not short:
            break
        trial = replace(trial, report=_without(trial.report, short[-1]))
    return trial


def amended(trial: TrialRecord, report: TrialReport) -> TrialReport:
    """Return the report of a probed trial after real steps, or after its check.

    Args:
        trial: The trial, of which single chunks were measured.
        report: What the same process found of its best plan later.
    """
    assert trial.report is not None, "the trial has ended"
    seconds = added(trial.report.seconds_by_phase, report.seconds_by_phase)
    before = replace(trial.report, seconds_by_phase=seconds)
    if report.verdict is Verdict.MEASURED and report.measurement is not None:
        measured = before.measurements  # beside what the probe predicted
        if report.measurement not in measured:
            measured = (*measured, report.measurement)
        return replace(before, best=report.plan, measurements=measured, reason=report.reason)
    if report.verdict is Verdict.OUT_OF_MEMORY and report.out_of_memory is not None:
        return _without(before, report.out_of_memory) if before.measurements else before
    return replace(
        before,
        verdict=report.verdict,
        reason=report.reason,
        blamed=report.blamed,
        traceback=report.traceback,
        best=None,
        measurements=(),
    )


def _slower(trial: TrialRecord, first: Measurement, last: Measurement | None) -> TrialRecord:
    """Return a trial with ``last`` in place of ``first``, if a lack of memory made it slower."""
    assert trial.report is not None, "the trial was measured"
    assert last is not None, "the confirmation run fitted"
    if not last.strained or last.samples_per_second >= (1 - TIE) * first.samples_per_second:
        return trial
    measured = (*trial.report.measurements[:-1], last)
    return replace(trial, report=replace(trial.report, measurements=measured))


def _without(report: TrialReport, short: OutOfMemory) -> TrialReport:
    """Return a report without its winning numbers, which ran out of memory when confirmed."""
    last = report.measurements[-1]
    size, level, several = last.micro_batch, last.checkpointing, solved(report.plan)
    short = replace(short, micro_batch=size, checkpointing=level)
    outside = short.phase == OUTSIDE  # a probe does not see what the script does there
    measured = [each for each in report.measurements if several and not (each.probed and outside)]
    leaner = [each for each in measured if each.leaner(size, level)]
    if not leaner:
        return replace(
            report,
            verdict=Verdict.OUT_OF_MEMORY,
            reason=short.message,
            best=None,
            measurements=(),
            out_of_memory=short,
        )
    leaner.sort(key=lambda each: each.samples_per_second)
    best = leaner[-1].plan(report.plan)
    return replace(report, best=best, measurements=(*leaner,), out_of_memory=short)


def culprit(report: TrialReport, finished: Iterable[TrialRecord] = ()) -> tuple[str, str] | None:
    """Return the ``(strategy, level)`` that a failed trial rules out; ``None`` if it is not clear.

    It is the level of the blamed strategy, or the only level of the plan. For a plan that failed or
    drifted, it can also be the only level that a successful plan lacks. After drift, only plans
    whose first steps were compared with the reference count as successful.
    """
    plan = report.plan.searched
    if report.blamed is not None:
        return report.blamed, plan[report.blamed]
    changed = set(plan.changes)
    if report.verdict in (Verdict.DRIFTED, Verdict.PLAN_FAILED):
        good = [trial for trial in finished if trial.verdict is Verdict.MEASURED]
        if report.verdict is Verdict.DRIFTED:
            good = [trial for trial in good if trial.report and trial.report.index == 0]
        suspects = [changed - set(trial.plan.searched.changes) for trial in good]
        changed = min(suspects, key=len, default=changed) or changed
    changed = _suspected(changed)
    return changed.pop() if len(changed) == 1 else None


def _suspected(changed: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the levels that may be at fault.

    Levels that every plan has in place of ``as_is`` are left out, unless there are no others.
    """
    return {
        each for each in changed if not strategies.get(each[0]).level(each[1]).replaces_as_is
    } or (changed)


def refused(finished: Iterable[TrialRecord]) -> list[TrialReport]:
    """Return the reports of the trials that were refused."""
    found = (trial.report for trial in finished if trial.verdict is Verdict.REFUSED)
    return [report for report in found if report is not None]


def tainted(plan: Plan, ended: Iterable[TrialReport], finished: Sequence[TrialRecord]) -> bool:
    """Return whether ``plan`` contains the levels that made another plan drift or be refused.

    If the level at fault is known, it is enough that ``plan`` has it. Otherwise ``plan`` must have
    all levels of the other plan. After drift, ``micro_batch`` is not compared, because each trial
    finds its own size.

    Args:
        plan: The plan to check.
        ended: Reports of plans that drifted or were refused.
        finished: Finished trials, from which the level at fault is derived.
    """
    for report in ended:
        found = culprit(report, finished)
        levels = dict([found] if found else _suspected(set(report.plan.searched.changes)))
        if len(levels) > 1 and report.verdict is Verdict.DRIFTED:
            levels.pop(SPLIT, None)
        if levels and levels.items() <= plan.searched.levels.items():
            return True
    return False


def closest(finished: Iterable[TrialRecord]) -> TrialRecord | None:
    """Return the trial that got furthest before it ran out of memory; of several, the leanest.

    A trial that completed a step got further than one that did not, because it also held the
    optimizer's state. Otherwise the later phase of the step decides.
    """
    short = [trial for trial in finished if trial.verdict is Verdict.OUT_OF_MEMORY]
    return max(short, key=lambda trial: (_progress(trial), by_cost(trial.plan)), default=None)


def _progress(trial: TrialRecord) -> tuple[bool, int]:
    """Return whether a trial completed its first step, and the index of its last phase.

    The size of the failed allocation is no measure of progress.
    """
    shortage = trial.report.out_of_memory if trial.report else None
    if shortage is None:
        return False, -1
    into = PHASES.index(shortage.phase) if shortage.phase in PHASES else -1
    return bool(shortage.steps) or shortage.phase == PHASES[-1], into


def margin(one: Measurement, other: Measurement) -> float:
    """Return the share by which two speeds must differ before one of them counts as higher.

    It is at least ``TIE``, and at least the spread of the difference: the spreads of two
    independent measurements add up as the root of their squares.
    """
    return max(TIE, math.hypot(one.spread, other.spread))


def variation(*plans: Sequence[Measurement]) -> float:
    """Return how much the figures of some plans vary, as a share.

    ``plans``: the measurements of each plan, from different processes. The result is the largest of
    two shares: by how much the steps of one measurement vary (``Measurement.variation``), and by
    how much the speeds of one plan differ (half their range, relative to its middle). A machine
    that this training has for itself shows a few percent.
    """
    steps = [each.variation for plan in plans for each in plan]
    speeds = [[each.samples_per_second for each in plan] for plan in plans]
    differ = [(max(plan) - min(plan)) / (max(plan) + min(plan)) for plan in speeds if plan]
    return max([*steps, *differ], default=0.0)


def is_faster(new: Measurement, old: Measurement) -> bool:
    """Return whether ``new`` is faster than ``old`` by more than ``margin``."""
    return new.samples_per_second > (1 + margin(new, old)) * old.samples_per_second
