"""What a report shows, read from the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan

from autofit.analysis.frontier import Point, frontier
from autofit.analysis.result import Result
from autofit.analysis.studies import StoredStudy, stored_study
from autofit.analysis.verdicts import best_plan
from autofit.plan import Plan
from autofit.space.static_memory import Static
from autofit.storage import Store, StudyRecord, TrialRecord
from autofit.strategies import Memory
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import Measurement, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBar:
    """The memory of one plan: predicted parts, and measured figures if it was measured."""

    title: str
    plan: Plan
    static: dict[Memory, float]
    """Predicted bytes of weights, gradients and optimizer state."""
    measurement: Measurement | None
    """``None`` if the plan did not fit."""

    @property
    def rest(self) -> float:
        """Bytes of all other tensors at the measured peak: activations and workspace."""
        if self.measurement is None:
            return 0.0
        return max(0.0, self.measurement.peak_allocated - sum(self.static.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """Losses of the first steps of one process."""

    title: str
    traced: tuple[float, ...]
    """Losses of the traced steps: every process begins with these batches and weights.

    NaN for a step whose loss is not known.
    """
    measured: tuple[float, ...]
    """Losses of the first measured steps after those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A study as a report shows it."""

    found: StoredStudy
    frontier: tuple[Point, ...]
    memory: tuple[MemoryBar, ...]
    losses: tuple[LossCurve, ...]
    """Of the reference and of the best plan's confirmation run; those that are known."""

    @property
    def study(self) -> StudyRecord:
        """The study."""
        return self.found.study

    @property
    def result(self) -> Result | None:
        """The best result; ``None`` if no plan fits."""
        return self.found.result

    @property
    def draws_frontier(self) -> bool:
        """Whether the frontier is a line: one plan makes none."""
        return len(self.frontier) > 1

    @property
    def measured(self) -> list[TrialRecord]:
        """The measured trials by number."""
        return [trial for trial in self.found.trials if trial.verdict is Verdict.MEASURED]

    @property
    def compared(self) -> list[TrialRecord]:
        """The trials whose step times are compared: the first, the frontier's, and the best.

        The first measured trial is the script as it is, or the reference if that does not fit.
        """
        winner = self.found.winner
        numbers = {number_of(self.found.trials, point.measurement) for point in self.frontier}
        numbers |= {trial.number for trial in self.measured[:1]}
        numbers |= {winner.number} if winner is not None else set()
        return [trial for trial in self.measured if trial.number in numbers]


def read(store: Store, study: StudyRecord) -> Content:
    """Return what a report of ``study`` shows."""
    found = stored_study(store, study)
    return Content(
        found=found,
        frontier=frontier(store, study),
        memory=tuple(_memory(found)),
        losses=tuple(_losses(store, found)),
    )


def number_of(trials: Sequence[TrialRecord], measured: Measurement) -> int | None:
    """Return the number of the trial that made a measurement."""
    for trial in trials:
        if trial.report is not None and measured in trial.report.measurements:
            return trial.number
    return None


def _memory(found: StoredStudy) -> list[MemoryBar]:
    """Return the bars of the script as it is and of the best plan."""
    facts, result = found.study.facts, found.result
    if facts is None or not facts.roots:
        return []
    static = Static.of(facts)
    baseline = result.baseline if result is not None else None
    bars = [
        MemoryBar(
            title="as it is", plan=Plan(), static=static.by_kind(Plan()), measurement=baseline
        )
    ]
    if result is not None and not result.plan.neutral:
        bars.append(
            MemoryBar(
                title="best plan",
                plan=result.plan,
                static=static.by_kind(result.plan),
                measurement=result.measurement,
            )
        )
    return bars


def _losses(store: Store, found: StoredStudy) -> list[LossCurve]:
    curves = []
    reference = store.reference(found.study)
    if reference is not None:
        trial, trace = reference
        curves.append(_curve(f"reference: {best_plan(trial)}", trial, trace))
    winner = found.winner
    if winner is not None and (reference is None or winner.id != reference[0].id):
        trace_or_none = store.trace(winner)
        if trace_or_none is not None:
            curves.append(_curve(f"best plan: {best_plan(winner)}", winner, trace_or_none))
    return [curve for curve in curves if any(map(isfinite, (*curve.traced, *curve.measured)))]


def _curve(title: str, trial: TrialRecord, trace: Trace) -> LossCurve:
    """Return the traced losses of a trial, and those of its first window after them.

    Where steps are slow, the window begins with traced steps; each is a part of the curve once.
    """
    first = trial.report.measurements[0] if trial.report and trial.report.measurements else None
    traced = tuple(sum(step.losses) if step.losses else nan for step in trace.steps)
    losses = () if first is None else first.losses
    most = min(len(traced), len(losses))
    again = next(n for n in range(most, -1, -1) if losses[:n] == traced[len(traced) - n :])
    return LossCurve(title=title, traced=traced, measured=losses[again:])
