"""How a search says why it found nothing, or doubts what it found: one line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from autofit.analysis.pruning import PHASES, closest
from autofit.analysis.ranking import TIE, best_plan, fits
from autofit.exceptions import NothingFits, ScriptError, UsageError
from autofit.plan import Plan
from autofit.storage import TrialRecord
from autofit.units import format_duration, format_size
from autofit.worker.records.trials import Script, TrialReport, Verdict

CALLED = ("backward", "optimizer step")
"""Where memory may run out in a script of whose model no call was seen."""


def give_up(finished: Sequence[TrialRecord], budget: int, timeout: float | None) -> NoReturn:
    """Raise the error of a search without a plan to keep; ``timeout``: in seconds, if it is up."""
    if timeout is not None and closest(finished) is None:
        raise UsageError(out_of_time(timeout))
    late = "" if timeout is None else f"; --timeout {format_duration(timeout)} was up: give it more"
    raise NothingFits(none_fits(finished, budget) + late)


def hardly_fits(plan: Plan) -> str:
    """Say that a plan was measured again, and was slower for want of memory."""
    return (
        f"{plan} is slower by itself: it hardly fits, and has to free memory in step after step or"
        " to do without"
    )


def did_not_hold(plan: Plan, confirmations: Sequence[TrialRecord]) -> str:
    """Say why a plan that was measured in the search is not kept."""
    last = confirmations[-1].report if confirmations else None
    if last is not None and last.verdict is Verdict.DRIFTED:
        return f"{plan} drifted: {last.reason}"
    reason = last.reason if last is not None else "it did not finish"
    if last is not None and (short := last.out_of_memory) is not None:
        told = short.phase == PHASES[-1]  # no allocation has failed
        reason = short.message if told else short.where
    return f"{plan} did not hold when measured again: {reason}"


def replaced(
    first: Plan, again: Sequence[TrialRecord], winner: TrialRecord, budget: int, horizon: int
) -> str:
    """Say which plan is kept in place of the search's fastest, and why.

    ``again``: the trials in which ``first`` was measured again; ``budget``: bytes of a device;
    ``horizon``: optimizer steps over which the time to compile is charged.
    """
    return f"{best_plan(winner)} takes the place of {first}, {_why(again, winner, budget, horizon)}"


def _why(again: Sequence[TrialRecord], winner: TrialRecord, budget: int, horizon: int) -> str:
    held = [trial.measurement for trial in again if fits(trial, budget)]
    old, new = held[-1] if held else None, winner.measurement
    if old is None or new is None:
        verdict = again[-1].verdict if again else None
        return f"which {_NOT_KEPT.get(verdict, 'did not hold')} when it was measured again"
    slower = 1 - old.charged(horizon) / new.charged(horizon)
    if slower > TIE:
        return f"which is {100 * slower:.0f} % slower now that both are measured again"
    more = format_size(max(0, old.peak_device - new.peak_device))
    within = f"within {100 * TIE:.0f} %"
    return f"which is as fast when it is measured again ({within}) and needs {more} more"


_NOT_KEPT: dict[Verdict | None, str] = {
    Verdict.MEASURED: "did not fit the budget",
    Verdict.OUT_OF_MEMORY: "ran out of memory",
    Verdict.DRIFTED: "drifted",
    Verdict.REFUSED: "was refused",
    Verdict.TIMED_OUT: "was not done in time",
    None: "did not finish",
}
"""What became of a plan that was measured again and is not kept."""


def doubted(plan: Plan, reason: str) -> str:
    """Say that the script is run again because of what happened under ``plan``."""
    return f"{plan}: {reason}; the script is run again without it, to tell whose doing that is"


def killed(report: TrialReport) -> str:
    """Say that a plan is run again whose process somebody else has ended."""
    return f"{report.plan}: {report.reason}, by something outside the script; it is run once more"


def none_fits(finished: Sequence[TrialRecord], budget: int) -> str:
    """Say which of the plans tried came closest to ``budget`` bytes."""
    size = format_size(budget)
    trial = closest(finished)
    if trial is None or trial.report is None or trial.report.out_of_memory is None:
        return f"no plan could be measured within {size}"
    short = trial.report.out_of_memory
    asked = f", {format_size(short.requested)} asked" if short.requested else ""
    what = f"{trial.plan}, {short.where}{asked}"
    if len(finished) == 1:
        return f"the only plan tried does not fit in {size}: {what}"
    return f"none of the {len(finished)} plans tried fits in {size}; closest came {what}"


def failed(finished: Sequence[TrialRecord]) -> bool:
    """Return whether a trial has shown a fault of the script's own."""
    hung = any(t.plan.neutral and t.verdict is Verdict.TIMED_OUT for t in finished)
    return hung or any(t.verdict is Verdict.SCRIPT_FAILED for t in finished)


def of_baseline(
    finished: Sequence[TrialRecord], script: Script, budget: int, *, seen: bool
) -> None:
    """Raise the error that ends a search whose script, as it is, shows that no plan can help.

    ``seen``: it called a module with gradients, or may do so under a plan.
    """
    trial = next((trial for trial in finished if trial.plan.neutral), None)
    if trial is None or trial.report is None:
        return
    report = trial.report
    if report.verdict is Verdict.SCRIPT_FAILED:
        raise ScriptError(f"{script.target}: {report.reason}", report.traceback)
    if report.verdict is Verdict.TIMED_OUT:
        raise ScriptError(f"{script.target}: {report.reason}")
    if report.verdict is Verdict.OUT_OF_MEMORY and not seen:
        raise NothingFits(model_too_large(report, budget))


def model_too_large(report: TrialReport, budget: int) -> str:
    """Say that memory ran out where no plan reaches: before the model is first called, if ever."""
    short = report.out_of_memory
    if short is not None and short.phase in CALLED:
        return (
            f"memory ran out in {short.phase}, and the script called no torch.nn.Module with"
            " gradients: there is nothing to attach to (model.forward(x) is no call of the model)"
        )
    return (
        f"memory ran out before the model's first forward: {report.reason};"
        f" the budget is {format_size(budget)}, give more with --memory"
    )


def out_of_time(seconds: float) -> str:
    """Say that the search's own time was up too early."""
    return f"nothing was measured within --timeout {format_duration(seconds)}: give it more time"


def too_short(script: Script, steps: int, *, seen: bool) -> str:
    """Say that a script took too few optimizer steps, or showed nothing, to be measured.

    ``seen``: it called a module with gradients.
    """
    if steps == 0:
        return (
            f"{script.target} ended without an optimizer step: there is nothing to measure;"
            " give it arguments with which it trains"
        )
    if not seen:
        return (
            f"{script.target} took {steps} optimizer step{'s' if steps > 1 else ''}, but called no"
            " torch.nn.Module with gradients: there is nothing to attach to"
        )
    return (
        f"{script.target} ended after {steps} optimizer step{'s' if steps > 1 else ''}: too few to"
        " measure; give it arguments with which it trains for longer"
    )
