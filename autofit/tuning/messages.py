"""The messages of a search: why it found no plan, and why it changed its choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from autofit.analysis.advice import BY_HAND, lacking, where
from autofit.analysis.fallback import FallbackContext
from autofit.analysis.ranking import extent
from autofit.analysis.verdicts import PHASES, best_plan, closest, fits, margin
from autofit.exceptions import NothingFits, ScriptError, UsageError
from autofit.plan import Plan
from autofit.space.static_memory import least_bytes
from autofit.storage import TrialRecord
from autofit.strategies import Fidelity
from autofit.units import format_duration, format_size
from autofit.worker.records import phases
from autofit.worker.records.inspection import Growth
from autofit.worker.records.trials import CHECK_STARVED, OutOfMemory, Script, TrialReport, Verdict

CALLED = ("backward", "optimizer step")
"""Phases in which memory may run out although no call of a model was seen."""

LEARNS_NOTHING = "--sampler gp ignores trials that ran out of memory: it learns nothing from them."

LINE = 60
"""Most characters of a line of the script in a message."""
STARTS = "starts Ray, imports the script"
"""What happens before the first launch."""
DOES = {
    phases.IMPORT: "imports the script",
    phases.FIRST_BATCH: "waits for the first batch",
    phases.OBSERVE: "observes the script's steps",
    phases.PROBE: "probes",
    phases.CHECK: "verifies",
    phases.CONFIRM: "takes real steps",
}
"""What a launch does in each phase of ``phases.TOLD``."""

LOSS_NOT_FINITE = (
    "the loss becomes infinite or NaN. No plan that does not round fits, which would tell whether"
    " the script's own loss does. Give a lower learning rate, or more with --memory"
)


def give_up(
    finished: Sequence[TrialRecord], context: FallbackContext, timeout: float | None
) -> NoReturn:
    """Raise the error of a search that found no plan; ``timeout``: seconds, if they are over."""
    if timeout is not None and closest(finished) is None:
        limit = f"--timeout {format_duration(timeout)}"
        raise UsageError(f"no plan was measured within {limit}: give more time")
    late = "" if timeout is None else f"; --timeout {format_duration(timeout)} is over"
    raise NothingFits(none_fits(finished, context) + late)


def hardly_fits(plan: Plan) -> str:
    """Return the line for a plan that was slower in its confirmation run, for want of memory."""
    return (
        f"{plan}: the confirmation run was slower, because memory was nearly full and the allocator"
        " had to free some in each step."
    )


def did_not_hold(plan: Plan, confirmations: Sequence[TrialRecord]) -> str:
    """Return the line that says why a plan failed its confirmation run."""
    last = confirmations[-1].report if confirmations else None
    if last is not None and last.verdict is Verdict.DRIFTED:
        return f"{plan} trains something else: {last.reason}"
    reason = last.reason if last is not None else "it did not finish"
    if last is not None and (short := last.out_of_memory) is not None:
        no_failure = short.phase == PHASES[-1]  # no allocation failed
        reason = short.message if no_failure else short.where
    return f"{plan} failed its confirmation run: {reason}"


def not_confirmed(*, verified: bool) -> str:
    """Return the line for a plan that no new process has measured because time was up."""
    more = "" if verified else ", nor to verify it. autofit run verifies it first"
    return f"--timeout left no time to measure the plan again in a new process{more}."


def not_verified(plan: Plan) -> str:
    """Return the line for a winner whose check needs more memory than its training."""
    return f"{plan} is not verified yet: {CHECK_STARVED}. autofit run verifies it first."


def replaced(
    first: Plan, again: Sequence[TrialRecord], winner: TrialRecord, budget: int, horizon: int
) -> str:
    """Return the line that says which plan replaces the search's fastest, and why.

    Args:
        first: The fastest plan of the search.
        again: The confirmation runs of ``first``.
        winner: The trial whose plan replaces ``first``.
        budget: Bytes of a device.
        horizon: Optimizer steps over which the time to compile is charged.
    """
    return f"{best_plan(winner)} replaces {first}, {_why(first, again, winner, budget, horizon)}"


def _why(
    first: Plan, again: Sequence[TrialRecord], winner: TrialRecord, budget: int, horizon: int
) -> str:
    held = [trial.measurement for trial in again if fits(trial, budget)]
    old, new = held[-1] if held else None, winner.measurement
    if old is None or new is None:
        verdict = again[-1].verdict if again else None
        return f"which {_NOT_KEPT.get(verdict, 'failed')} in its confirmation run"
    slower = 1 - old.charged(horizon) / new.charged(horizon)
    same = margin(old, new)
    if slower > same:
        return f"which was {100 * slower:.0f} % slower in the confirmation runs"
    spread = f"{100 * same:.0f} %"
    if extent(best_plan(winner)) < extent(first):
        return f"which was not faster by more than the spread ({spread}), and changes more"
    more = old.peak_device - new.peak_device
    if more <= 0:
        return f"which was slower in the confirmation runs, by less than their spread ({spread})"
    as_fast = f"which was as fast in its confirmation run (within {spread})"
    return f"{as_fast} and needs {format_size(more)} more"


_NOT_KEPT: dict[Verdict | None, str] = {
    Verdict.MEASURED: "did not fit the budget",
    Verdict.OUT_OF_MEMORY: "ran out of memory",
    Verdict.DRIFTED: "drifted",
    Verdict.REFUSED: "was refused",
    Verdict.TIMED_OUT: "was not done in time",
    None: "did not finish",
}
"""How a confirmation run ended whose plan is not kept."""


def doubted(plan: Plan, reason: str) -> str:
    """Return the line that says that the script runs again without ``plan``, for comparison."""
    return f"{plan}: {reason}. The script runs again without the plan, to find the cause."


def killed(report: TrialReport) -> str:
    """Return the line for a plan whose process was killed from outside."""
    return f"{report.plan}: {report.reason}, by something outside the script. It is run once more."


def keeps_graphs(script: Script, growth: Growth) -> str:
    """Return the line for a script that keeps the graph of each step."""
    kept_in = f" in {growth.holder}" if growth.holder else ""
    what = "host memory grows with each step"
    if growth.size:
        size = format_size(growth.size)
        what = f"the training needs about {size} more with each step than was measured"
    help_ = f"autofit explain --leak {script.target} shows which tensors are left"
    if (line := growth.held_at) is not None:
        kept_in += f" ({line.line}: {line.source[:LINE]})"
        help_ = "Keep the value alone, with .item() or .detach()"
    return f"{script.target} keeps the graph of each step{kept_in}: {what}. {help_}."


def none_fits(finished: Sequence[TrialRecord], context: FallbackContext) -> str:
    """Return the error that no plan fits: which came closest, what it needs, and what may help."""
    size = format_size(context.budget)
    trial = closest(finished)
    if trial is None or trial.report is None or trial.report.out_of_memory is None:
        return f"no plan could be measured within {size}"
    short = trial.report.out_of_memory
    help_ = _what_may_help(trial.plan, short, context)
    what = f"{trial.plan}, {where(short, context.budget)}; {help_}"
    if len(finished) == 1:
        return f"the only plan tried does not fit in {size}: {what}"
    return f"none of the {len(finished)} plans tried fits in {size}; the closest was {what}"


def _what_may_help(plan: Plan, short: OutOfMemory, context: FallbackContext) -> str:
    """Return what a search without a plan that fits leaves to the user."""
    static = least_bytes(plan, context.facts, cuda=not context.hardware.on_host)
    help_ = f"what may help is more --memory, or {BY_HAND[lacking(short)]}"
    if static > context.budget:
        help_ = (
            "its weights, gradients and optimizer state alone need"
            f" {format_size(int(static))} of --memory"
        )
    return help_ if context.allow is Fidelity.RECIPE else f"{help_}, or --allow recipe"


def failed(finished: Sequence[TrialRecord]) -> bool:
    """Return whether a trial failed because of the script itself."""
    hung = any(t.plan.neutral and t.verdict is Verdict.TIMED_OUT for t in finished)
    return hung or any(t.verdict is Verdict.SCRIPT_FAILED for t in finished)


def of_baseline(
    finished: Sequence[TrialRecord], script: Script, budget: int, *, seen: bool
) -> None:
    """Raise the error that ends a search if the neutral plan shows that no plan can help.

    ``seen``: whether the script called a module with gradients, or may do so under a plan.
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
    """Return the error that memory ran out before the model was called, where no plan helps."""
    short = report.out_of_memory
    if short is not None and short.phase in CALLED:
        return (
            f"memory ran out in {short.phase}, and the script called no torch.nn.Module with"
            " gradients. autofit acts in such calls: write model(x), not model.forward(x)"
        )
    return (
        f"memory ran out before the model's first forward: {report.reason};"
        f" the budget is {format_size(budget)}, give more with --memory"
    )


def too_short(script: Script, steps: int, *, seen: bool) -> str:
    """Return the error that a script took too few optimizer steps, or called no model.

    ``seen``: whether the script called a module with gradients.
    """
    if steps == 0:
        return (
            f"{script.target} ended without an optimizer step, which is what autofit measures;"
            " give it arguments with which it trains"
        )
    if not seen:
        return (
            f"{script.target} took {steps} optimizer step{'s' if steps > 1 else ''}, but called no"
            " torch.nn.Module with gradients. autofit acts in such calls: write model(x)"
        )
    return (
        f"{script.target} ended after {steps} optimizer step{'s' if steps > 1 else ''}: too few to"
        " measure; give it arguments with which it trains for longer"
    )
