"""The reference of a study: the first steps of the script as it is, if it fits.

The training under a plan is compared with it when the plan is confirmed in a new process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autofit.analysis.verdicts import ExpectedTraining, compared, losses_of
from autofit.equivalence.compare import compare, finite
from autofit.plan import Plan
from autofit.storage import Purpose, TrialRecord
from autofit.strategies import Facts, Fidelity
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import TrialReport, Verdict

NO_REFERENCE = (
    "The script does not fit as it is, so no losses can be compared with its own. Plans are"
    " verified by their gradients."
)
SAME_LOSS = (
    "The loss becomes infinite or NaN under a plan that does not round, so it does in the script"
    " itself."
)
OWN_LOSS = "The script's own loss becomes infinite or NaN. The losses of plans are not compared."


class Reference:
    """The reference trial, once there is one, and its training.

    ``say`` receives lines for the user; the same line may come again.
    """

    def __init__(
        self, stored: tuple[TrialRecord, Trace] | None, say: Callable[[str], None]
    ) -> None:
        self._say = say
        self.training = ExpectedTraining(plan=Plan())
        if stored is not None:
            trial, trace = stored
            self._take(trial.plan, trial.report, trace)

    @property
    def plan(self) -> Plan:
        """The plan of the reference; the neutral one while there is none."""
        return self.training.plan

    @property
    def trace(self) -> Trace | None:
        """The first steps of the reference."""
        return self.training.trace

    def adopt(self, trial: TrialRecord, report: TrialReport, trace: Trace | None) -> Trace | None:
        """Make the script as it is the reference, if there is none; return the trace to store."""
        observed = trial.plan.neutral and trial.purpose is Purpose.SEARCH
        if self.trace is not None or trace is None or not observed:
            return None
        if report.verdict is not Verdict.MEASURED:
            return None
        self._take(trial.plan, report, trace)
        return trace

    def _take(self, plan: Plan, report: TrialReport | None, trace: Trace) -> None:
        losses = (*_start(trace), *losses_of(report))
        self.training = replace(self.training, plan=plan, trace=trace, losses=losses)
        if not finite(losses):
            self._say(OWN_LOSS)

    def compared(
        self,
        report: TrialReport,
        trace: Trace | None,
        facts: Facts | None,
    ) -> TrialReport:
        """Return the report, as ``drifted`` if its training is not the reference's.

        See ``verdicts.compared``.
        """
        found = compared(report, trace, self.training, facts)
        if found.without_reference:
            self._say(NO_REFERENCE)
            if found.report.verdict is Verdict.MEASURED and not finite(losses_of(found.report)):
                self._say(SAME_LOSS)
        if found.obstacle:
            self._say(f"The steps cannot be compared: {found.obstacle}. Only losses are compared.")
        return found.report

    def run_again(self, trace: Trace) -> None:
        """Learn from the trace of a second run whether the script repeats itself."""
        assert self.trace is not None
        other = compare(trace, self.trace, Fidelity.EXACT, splits=False)
        repeats = other.drifted is None and other.steps > 0
        self.training = replace(self.training, repeats=repeats)
        if not repeats:
            why = other.drifted or other.obstacle
            self._say(
                f"Two runs of the script differ ({why}). The steps of plans are not compared."
            )

    def run_longer(self, report: TrialReport) -> None:
        """Take over the losses of a longer run of the reference."""
        if self.trace is not None and report.verdict is Verdict.MEASURED:
            longer = (*_start(self.trace), *losses_of(report))
            self.training = replace(
                self.training, losses=max(self.training.losses, longer, key=len)
            )
            if not finite(self.training.losses):
                self._say(OWN_LOSS)


def _start(trace: Trace) -> list[float]:
    """Return the loss of each step in a trace."""
    return [sum(step.losses) for step in trace.steps]
