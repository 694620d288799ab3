"""What a trial's report means: the only module that judges.

A verdict forms in four steps. ``within`` refuses a plan that changes more than is allowed.
``compared`` tells whether the plan trains what the reference trains. ``judged`` finds whose fault a
failure is. ``corrected`` takes the confirmation run into account. ``culprit`` and ``tainted`` then
say which other plans the verdict rules out. All are pure functions of records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autofit import strategies
from autofit.equivalence.compare import compare, finite, strays
from autofit.plan import Plan
from autofit.space.order import by_cost
from autofit.storage import TrialRecord
from autofit.strategies import AS_IS, Facts, Fidelity
from autofit.strategies.micro_batch import AUTO
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import CHECK, Measurement, OutOfMemory, TrialReport, Verdict

BLAMED = (Verdict.REFUSED, Verdict.PLAN_FAILED, Verdict.DRIFTED)
"""Verdicts that rule a level out, where it is known which."""


PHASES = ("outside the model", CHECK, "forward", "backward", "optimizer step", "the whole step")
"""Of a step, in their order."""


TIE = 0.03
"""Speeds that differ by no more than this are the same: launches of one plan differ as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What the reference trained, as far as it is known."""

    plan: Plan
    trace: Trace | None = None
    """Its first steps; ``None`` while there is no reference."""
    losses: tuple[float, ...] = ()
    """Losses of all its steps, the longest run of it."""
    repeats: bool | None = None
    """Whether a second run did the same; ``None`` before there was one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What ``compared`` found."""

    report: TrialReport | None
    """The report, as ``drifted`` if the training differs; ``None`` if only a run of the plan in a
    fresh process can tell."""
    obstacle: str = ""
    """Why the steps were not compared."""
    without_reference: bool = False
    """There was nothing to compare the steps with."""


def compared(
    report: TrialReport, trace: Trace | None, expected: Training, facts: Facts | None
) -> Comparison:
    """Compare the training of a measured plan with the reference's.

    ``trace`` holds the first steps of a plan that came first in its process. Without a trace, the
    plan began with weights that other plans had trained, and only its losses can be compared.
    """
    if report.verdict is not Verdict.MEASURED:
        return Comparison(report=report)
    fidelity = report.plan.fidelity(facts)
    obstacle, without = "", False
    if trace is not None and not report.plan.neutral and fidelity < Fidelity.RECIPE:
        if expected.trace is None:
            without = True
        elif expected.repeats is not False:
            splits = any(each["micro_batch"] != AS_IS for each in (report.plan, expected.plan))
            steps = compare(trace, expected.trace, fidelity, splits=splits)
            if steps.drifted is not None:
                return Comparison(report=_drifted(report, steps.drifted))
            obstacle = (steps.obstacle or "") if steps.steps == 0 else ""
    reason = _strays(report, expected)
    if reason is not None:
        report_or_none = _drifted(report, reason) if trace is not None else None
        return Comparison(report=report_or_none, obstacle=obstacle, without_reference=without)
    return Comparison(report=report, obstacle=obstacle, without_reference=without)


def _strays(report: TrialReport, expected: Training) -> str | None:
    losses = losses_of(report)
    if expected.trace is None:
        return None if finite(losses) else "a loss that is not finite"
    return strays(losses, expected.losses)


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


def _drifted(report: TrialReport, reason: str) -> TrialReport:
    return replace(report, verdict=Verdict.DRIFTED, reason=reason)


def losses_of(report: TrialReport | None) -> list[float]:
    """Return the loss of each step that a trial measured."""
    if report is None:
        return []
    return [loss for each in report.measurements for loss in each.losses]


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


def best_plan(trial: TrialRecord) -> Plan:
    """Return the plan that a measured trial is worth: with the micro-batch size that won."""
    return (trial.report.best if trial.report else None) or trial.plan


def fits(trial: TrialRecord, budget: int) -> bool:
    """Return whether a trial was measured within ``budget`` bytes of device memory."""
    measurement = trial.measurement
    measured = trial.verdict is Verdict.MEASURED and measurement is not None
    return measured and measurement is not None and measurement.peak_device <= budget


def corrected(trial: TrialRecord, again: Sequence[TrialRecord], budget: int) -> TrialRecord:
    """Return a trial as its plan was when it was measured again, where memory made it another.

    Slower, where it hardly fits. Where it did not fit, it counts with the next smaller size that
    was measured, as far as that one holds; without such a size as one that ran out of memory.

    ``again``: the trials in which plans were measured again; ``budget``: in bytes of a device.
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


def _slower(trial: TrialRecord, first: Measurement, last: Measurement | None) -> TrialRecord:
    """Return a trial with what was measured ``last``, if memory made that slower than ``first``."""
    assert trial.report is not None, "it was measured"
    assert last is not None, "it fitted"
    if not last.strained or last.samples_per_second >= (1 - TIE) * first.samples_per_second:
        return trial
    measured = (*trial.report.measurements[:-1], last)
    return replace(trial, report=replace(trial.report, measurements=measured))


def _without(report: TrialReport, short: OutOfMemory) -> TrialReport:
    """Return the report of a trial whose winner, in a process of its own, ran out of memory."""
    size = report.measurements[-1].micro_batch
    own = report.plan["micro_batch"] == AUTO and report.plan.unsized == report.plan
    smaller = [each for each in report.measurements if own and each.micro_batch < size]
    short = replace(short, micro_batch=size)
    if not smaller:
        return replace(
            report,
            verdict=Verdict.OUT_OF_MEMORY,
            reason=short.message,
            best=None,
            measurements=(),
            out_of_memory=short,
        )
    smaller.sort(key=lambda each: each.samples_per_second)
    best = report.plan.replace(micro_batch=str(smaller[-1].micro_batch))
    return replace(report, best=best, measurements=(*smaller,), out_of_memory=short)


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
