"""What a study's plans are compared with: the script as it is, or else the leanest exact plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from autofit.equivalence.compare import compare, finite, strays
from autofit.plan import Plan
from autofit.space.catalogue import by_cost, expected
from autofit.storage import Purpose, TrialRecord
from autofit.strategies import AS_IS, Facts, Fidelity
from autofit.strategies.micro_batch import AUTO
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import TrialReport, Verdict

PARTS = 16
"""Of the batch, in which a reference that cannot win is measured: small ones, to fit."""
SLOW = 0.6
"""Expected step time of a plan, as a share of another's, from which the other cannot win."""
NOTHING_EXACT = (
    "there is no exact plan to compare others with: only losses that are not finite are noticed"
)
OWN_LOSS = "the loss of the script as it is does not stay finite: no plan is judged by its loss"


class Reference:
    """The trial that others are compared with, once there is one, and what it did.

    ``say`` is given lines for people, each once.
    """

    def __init__(
        self, stored: tuple[TrialRecord, Trace] | None, say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._said: set[str] = set()
        self.plan = Plan()
        self.trace: Trace | None = None
        self.repeats: bool | None = None
        """Whether a second run under the same plan did the same; ``None`` before there was one."""
        self._losses: list[float] = []
        """Of its steps, as far as it has been run."""
        if stored is not None:
            trial, trace = stored
            self._take(trial.plan, trial.report, trace)

    def adopt(
        self, trial: TrialRecord, report: TrialReport, trace: Trace | None, facts: Facts | None
    ) -> Trace | None:
        """Make a trial the reference if there is none and it may be; return what is to be stored.

        It must be exact and measured, and have come first in its process.
        """
        exact = trial.plan.fidelity(facts) <= Fidelity.REDRAW
        fit = exact and trial.purpose is Purpose.SEARCH and report.verdict is Verdict.MEASURED
        if self.trace is not None or trace is None or not fit:
            return None
        self._take(trial.plan, report, trace)
        if not trial.plan.neutral:
            self._tell(f"as it is it was not measured; plans are compared with {trial.plan}")
        return trace

    def _take(self, plan: Plan, report: TrialReport | None, trace: Trace) -> None:
        self.plan, self.trace = plan, trace
        self._losses = [sum(step.losses) for step in trace.steps] + _losses(report)
        if not finite(self._losses):
            self._tell(OWN_LOSS)

    def judged(
        self, report: TrialReport, trace: Trace | None, facts: Facts | None
    ) -> TrialReport | None:
        """Return the report, as ``drifted`` where its training is not the reference's.

        ``trace``: of its first steps, where it came first in its process. Without one it began
        with weights that other plans had trained: ``None`` is returned where its loss looks wrong
        all the same, and it has to be launched first in a process to be judged.
        """
        if report.verdict is not Verdict.MEASURED:
            return report
        fidelity = report.plan.fidelity(facts)
        if trace is not None and not report.plan.neutral and fidelity < Fidelity.RECIPE:
            reason = self._compared(report.plan, trace, fidelity)
            if reason is not None:
                return _drifted(report, reason)
        reason = self._strays(report)
        if reason is None:
            return report
        return _drifted(report, reason) if trace is not None else None

    def _compared(self, plan: Plan, trace: Trace, fidelity: Fidelity) -> str | None:
        if self.trace is None:
            self._tell(NOTHING_EXACT)
            return None
        if self.repeats is False:
            return None
        splits = any(each["micro_batch"] != AS_IS for each in (plan, self.plan))
        comparison = compare(trace, self.trace, fidelity, splits=splits)
        if comparison.steps == 0 and comparison.obstacle is not None:
            self._tell(f"steps are not compared: {comparison.obstacle}; losses are watched")
        return comparison.drifted

    def _strays(self, report: TrialReport) -> str | None:
        losses = _losses(report)
        if self.trace is None:
            return None if finite(losses) else "a loss that is not finite"
        return strays(losses, self._losses)

    # --- does it do the same again? --------------------------------------------------------

    def again(self, trace: Trace) -> None:
        """Learn from a second run whether the script repeats itself."""
        assert self.trace is not None
        other = compare(trace, self.trace, Fidelity.EXACT, splits=False)
        self.repeats = other.drifted is None and other.steps > 0
        if not self.repeats:
            why = other.drifted or other.obstacle
            self._tell(f"the script does not repeat itself ({why}): its steps are not compared")

    def longer(self, report: TrialReport) -> None:
        """Learn from a longer run how its loss goes on."""
        if self.trace is not None and report.verdict is Verdict.MEASURED:
            start = [sum(step.losses) for step in self.trace.steps]
            self._losses = max(self._losses, start + _losses(report), key=len)
            if not finite(self._losses):
                self._tell(OWN_LOSS)

    def _tell(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)


def leading(
    candidates: Sequence[Plan],
    finished: Iterable[TrialRecord],
    facts: Facts | None,
    *,
    cuda: bool,
) -> Plan | None:
    """Return the plan to launch next so that there is a reference where the script does not fit.

    The leanest exact one of those that most others can share a launch with; ``None`` where that has
    run out of memory as well. Where others are much faster, as levels promise for ``cuda``, it is
    measured in small parts only; if that comes to nothing, as the others are.
    """
    finished = tuple(finished)
    for trial in finished:
        exact = trial.plan.fidelity(facts) <= Fidelity.REDRAW
        if exact and not trial.plan.neutral and trial.verdict is Verdict.OUT_OF_MEMORY:
            return None
    exact_plans = [plan for plan in candidates if plan.fidelity(facts) <= Fidelity.REDRAW]
    shared = [plan for plan in exact_plans if plan.fixed.neutral]
    first = max(shared or exact_plans, key=by_cost, default=None)
    batch = facts.batch if facts is not None else None
    if first is None or first["micro_batch"] != AUTO or batch is None:
        return first
    small = first.replace(micro_batch=str(max(1, batch // PARTS)))
    tried = any(trial.plan == small for trial in finished)
    return small if cuda and slow(first, candidates) and not tried else first


def slow(plan: Plan, others: Iterable[Plan]) -> bool:
    """Return whether others are expected to be so much faster that ``plan`` cannot win."""
    return any(expected(other) <= SLOW * expected(plan) for other in others)


def _drifted(report: TrialReport, reason: str) -> TrialReport:
    return replace(report, verdict=Verdict.DRIFTED, reason=reason)


def _losses(report: TrialReport | None) -> list[float]:
    if report is None:
        return []
    return [loss for each in report.measurements for loss in each.losses]
