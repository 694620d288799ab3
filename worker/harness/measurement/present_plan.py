"""The plan that a trial measures now: its windows, its results, and what the parent hears of it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.worker.harness.measurement.step_meter import StepMeter
from autofit.worker.harness.measurement.window import Window, leaner_shortage
from autofit.worker.harness.session.session import Session
from autofit.worker.harness.torch_state.frames import source_digests
from autofit.worker.records.trials import (
    LaunchRequest,
    Measured,
    Measurement,
    OutOfMemory,
    PlanEnded,
    PlanStarted,
    Shortage,
    Traced,
    TrialReport,
    Verdict,
    Verified,
)

Schedule = Generator[Window | None, None, None]
"""Yields the next window of steps, or ``None`` to wait for the next call of the model."""
Measuring = Generator[Window | None, None, Measurement | None]


class PresentPlan:
    """Measures one plan after another by windows of real steps, and reports each."""

    def __init__(self, session: Session, request: LaunchRequest, steps: StepMeter) -> None:
        self._session, self._request, self._steps = session, request, steps
        self._ranks = steps.ranks
        self.plan = Plan()
        """As the parent gave it: it may leave numbers open."""
        self.results: list[tuple[Plan, Measurement]] = []
        """Measurements of the plan, the best one last when it ends."""
        self.shortage: OutOfMemory | None = None
        """The most informative shortage."""
        self.startup = 0.0
        """Seconds before the first step, for the plan that began the launch."""
        self.whole_fits = request.whole_fits
        """The script is known to fit as it is."""
        self.by_steps: dict[Plan, Measurement] = {}
        """What real steps have shown, by plan."""
        self._verified: set[Plan] = set()
        """Verified plans under which a step has run."""

    def choose(self, index: int, plan: Plan) -> None:
        """Measure ``plan`` from now on."""
        self._session.index, self.plan, self.results, self.shortage = index, plan, [], None

    def begin(self, index: int, plan: Plan) -> None:
        """Measure ``plan`` from now on, and tell the parent."""
        self.choose(index, plan)
        self._ranks.tell(PlanStarted(index=index, startup_seconds=self.startup))

    def steps(self, plan: Plan, steps: int, *, check: bool = False) -> Measuring:
        """Measure one window of real steps; return ``None`` if memory ran out.

        Raises ``Refused`` if the plan was refused.
        """
        window = self._steps.window(plan, steps, check=check)
        yield window
        if window.refusal is not None:
            # A new error: the frames of the first hold the batch.
            raise Refused(str(window.refusal), window.refusal.strategy)
        short, measurement = window.shortage, None
        if short is None:
            measurement = self._steps.measured(window)
            if self._request.converses and not plan.neutral:  # other plans have trained the weights
                measurement = replace(measurement, losses=())
            short = window.does_not_hold(measurement, self._request.budget)
        if short is not None or measurement is None:
            assert short is not None, "a window without a shortage has a measurement"
            self.shortage = leaner_shortage(self.shortage, short)
            return None
        if not check:
            self.by_steps[plan] = measurement
            self.found(plan, measurement)
        return measurement

    def is_known(self, plan: Plan) -> bool:
        """Return whether ``plan`` was verified on each model."""
        return all(root.proof.is_known(plan) for root in self._session.roots.alive)

    def stepped(self, window: Window) -> None:
        """Tell the parent of a verified plan once a step has run under it."""
        if (window.check or self.is_known(window.plan)) and window.plan not in self._verified:
            self._verified.add(window.plan)
            sources = source_digests(self._request.script.cwd)
            self._ranks.tell(Verified(plan=window.plan, sources=sources))

    def found(self, plan: Plan, measurement: Measurement) -> None:
        """Add a result; tell the parent of it, and what a split has shown of the models."""
        self.results.append((plan, measurement))
        roots = self._session.roots.alive
        known = tuple(root.facts for root in roots if root.facts is not None)
        if known != self._session.facts.roots:
            self._session.learn(roots=known)
        self._ranks.tell(Measured(index=self._session.index, measurement=measurement))

    def ran_short(self, found: OutOfMemory) -> None:
        """Add a shortage of a probe, and tell the parent."""
        self.shortage = leaner_shortage(self.shortage, found)
        self._ranks.tell(Shortage(index=self._session.index, out_of_memory=found))

    def caught(self, window: Window) -> None:
        """End the plan whose shortage the script caught; smaller sizes that fitted count."""
        self.shortage = window.shortage
        self.results = window.leaner(self.plan, self.results)
        self.end(for_all=True)

    def end(
        self, reason: str = "", *, refusal: Refused | None = None, for_all: bool = False
    ) -> None:
        """Report the plan; ``for_all``: this rank reports for all, because it ends the launch."""
        session, tracer = self._session, self._steps.tracer
        if tracer.steps:  # a plan without a step leaves the trace to the next
            tracer.stop()
            trace = tracer.result(session.roots.sensitivity())
            if trace is not None and tracer.index == session.index:
                self._ranks.tell(Traced(index=session.index, trace=trace))
        verdict = Verdict.MEASURED if self.results else Verdict.OUT_OF_MEMORY
        if refusal is not None:
            verdict, reason = Verdict.REFUSED, str(refusal)
        elif not self.results and self.shortage is not None:
            reason = self.shortage.message
        self.whole_fits |= self.plan.neutral and bool(self.results)
        differences = [d for root in session.roots if (d := root.proof.difference) is not None]
        report = TrialReport(
            index=session.index,
            plan=self.plan,
            verdict=verdict,
            reason=reason,
            best=self.results[-1][0] if verdict is Verdict.MEASURED else None,
            measurements=tuple(measurement for _, measurement in self.results),
            out_of_memory=self.shortage,
            blamed=None if refusal is None else refusal.strategy,
            startup_seconds=self.startup,
            gradient_difference=max(differences, default=None),
        )
        self.startup = 0.0
        self._ranks.tell(PlanEnded(report=report), for_all=for_all)
