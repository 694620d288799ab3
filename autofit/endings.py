"""How a search that found nothing says why: one line each."""

from __future__ import annotations

from collections.abc import Sequence

from autofit.rules import closest
from autofit.storage import TrialRecord
from autofit.units import format_duration, format_size
from autofit.worker.records import Script, TrialReport


def none_fits(finished: Sequence[TrialRecord], budget: int) -> str:
    """Say which of the plans tried came closest to ``budget`` bytes."""
    size = format_size(budget)
    trial = closest(finished)
    if trial is None or trial.report is None or trial.report.out_of_memory is None:
        return f"no plan could be measured within {size}"
    short = trial.report.out_of_memory
    where = short.phase if short.phase.startswith("outside") else f"in {short.phase}"
    asked = f", {format_size(short.requested)} asked" if short.requested else ""
    return (
        f"none of the {len(finished)} plans tried fits in {size}; closest came {trial.plan},"
        f" out of memory {where}{asked}"
    )


def model_too_large(report: TrialReport, budget: int) -> str:
    """Say that memory ran out where no plan reaches: before the model is first called."""
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
