"""The stages of a trial: what is measured next, by probes or by real steps.

``Stages`` runs a generator of windows. ``Trial`` fills each window with the script's own steps;
``None`` in place of a window lets the script wait in the next call of its model, where plans are
probed.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import NoReturn

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.worker.harness.measurement.number_search import TURN, NumberSearch
from autofit.worker.harness.measurement.present_plan import Measuring, PresentPlan, Schedule
from autofit.worker.harness.measurement.step_meter import StepMeter
from autofit.worker.harness.measurement.suspension import ProbeSite
from autofit.worker.harness.measurement.window import Window, joined
from autofit.worker.harness.parent.pipe import Reporter
from autofit.worker.harness.session.session import Session
from autofit.worker.records.trials import (
    CHECK,
    CHECK_STARVED,
    Answer,
    Finished,
    LaunchRequest,
    Measurement,
    Stage,
)

OBSERVED = 2
"""Steps of the script as it is that are timed, after the traced ones."""
TURNS = 2
"""Windows of each plan when plans train in turn: A, B, A, B."""
SLOW = 1.0
"""Seconds of a step above which a window has one step less."""
GRACE = 10.0
"""Seconds in which a stopped script must end."""


class TrialOver(BaseException):
    """Ends the script after the last plan; not an ``Exception``: training loops catch those."""


def end_script(session: Session, reporter: Reporter) -> NoReturn:
    """Tell the parent that the script was stopped, and end it; soon also one that goes on."""
    session.over = True
    reporter.send(Finished(steps=session.steps, stopped=True))
    timer = threading.Timer(GRACE, os._exit, (0,))
    timer.daemon = True
    timer.start()
    raise TrialOver


class Stages:
    """Measures the plans of a launch, one after another."""

    def __init__(
        self,
        session: Session,
        request: LaunchRequest,
        reporter: Reporter,
        steps: StepMeter,
        site: ProbeSite,
    ) -> None:
        self.given = list(request.given)
        """The plans of the launch so far."""
        self.now = PresentPlan(session, request, steps)
        self.window: Window | None = None
        """The present window; ``None`` before the first, and while plans are probed."""
        self.begun = False
        self._session, self._request, self._reporter = session, request, reporter
        self._steps, self._site = steps, site
        self._numbers = NumberSearch(session, request.budget, self.now, site)
        self._schedule = self._run()

    @property
    def waits_for_call(self) -> bool:
        """Whether the schedule goes on in the next call of the model, which then waits."""
        return self.begun and self.window is None

    def advance(self) -> None:
        """Start the next window; end the script after the last one."""
        self.begun = True
        try:
            self.window = next(self._schedule)
        except StopIteration:
            self.window = None
            self._site.resume()
            end_script(self._session, self._reporter)
        if self.window is not None:
            self._site.resume()

    def _run(self) -> Schedule:
        """Do what the parent asks for, one answer after another."""
        for index, plan in enumerate(tuple(self.given)):
            yield from self._first(index, plan)
        while self._request.converses:
            answer = self._ask()
            if not answer.plans:
                return
            yield from self._follow(answer)

    def _ask(self) -> Answer:
        """Ask the parent for more plans."""
        self._steps.tracer.stop()  # steps under a plan are compared in a process of their own
        session = self._session
        first_call = session.step_calls.seen <= 1 and session.phase == "forward"
        fresh = session.steps == 0 and len(session.roots) == 1 and first_call
        answer = self._reporter.ask(fresh=fresh)
        self.now.whole_fits |= answer.whole_fits
        session.known.hear(answer.proven)
        return answer

    def _first(self, index: int, plan: Plan) -> Schedule:
        """Begin with a plan of the request.

        A search observes the script as it is, or probes the plan for which a launch was started. A
        plan that is measured again runs for more steps, and is verified afterwards unless it was.
        """
        measure = self._numbers.measure
        if not (self._request.converses or plan.open):
            measure = self._again
        elif plan.neutral:
            measure = self._as_it_is
        yield from self._reported(index, plan, measure(plan))

    def _follow(self, answer: Answer) -> Schedule:
        """Do what an answer asks for."""
        first = len(self.given)
        self.given += answer.plans
        if answer.stage is Stage.STEPS:
            yield from self._in_turn(range(first, len(self.given)))
            return
        measure = self._checked if answer.stage is Stage.CHECK else self._numbers.measure
        for index, plan in enumerate(answer.plans, first):
            yield from self._reported(index, plan, measure(plan))

    def _reported(self, index: int, plan: Plan, measuring: Schedule) -> Schedule:
        """Run ``measuring``, and report the plan with what it has measured."""
        self.now.begin(index, plan)
        try:
            yield from measuring
        except Refused as refusal:
            self.now.end(refusal=refusal)
        else:
            starved = self.now.shortage is not None and self.now.shortage.phase == CHECK
            self.now.end(CHECK_STARVED if starved else "")

    def _as_it_is(self, plan: Plan) -> Schedule:
        """Observe the script as it is."""
        self._numbers.observed = yield from self.now.steps(plan, OBSERVED)
        self._numbers.stepped = self._numbers.observed is not None

    def _again(self, plan: Plan) -> Schedule:
        """Measure a plan of an earlier search, and verify it if no process has.

        Sharded weights are never whole again, so what shards them is verified before.
        """
        verify = not (plan.neutral or self.now.is_known(plan))
        before = plan.shards is not None
        if verify and before:
            yield from self._check(plan)
        measurement = yield from self.now.steps(plan, self._request.steps)
        if verify and not before and measurement is not None:
            yield from self._checked(plan)

    def _checked(self, plan: Plan) -> Schedule:
        """Verify a plan that was measured, and run a step under it."""
        measurement = yield from self._check(plan)
        known = self.now.by_steps.get(plan, measurement)
        if known is not None and not self.now.results:
            self.now.found(plan, known)

    def _check(self, plan: Plan) -> Measuring:
        """Run a step in which a plan that fits is verified; memory that runs out is the check's."""
        measurement = yield from self.now.steps(plan, 1, check=True)
        if self.now.shortage is not None:
            self.now.shortage = replace(self.now.shortage, phase=CHECK)
        return measurement

    def _in_turn(self, indices: range) -> Schedule:
        """Measure plans by real steps: A, B, A, B. Report all of them at the end."""
        now = self.now
        windows: dict[int, list[Measurement]] = {index: [] for index in indices}
        for turn in range(TURNS):
            for index in [*windows]:
                plan = self.given[index]
                (now.begin if turn == 0 else now.choose)(index, plan)
                try:
                    known = now.by_steps.get(plan) or self._numbers.probes.get(plan)
                    slow = known is not None and known.seconds > SLOW
                    measurement = yield from now.steps(plan, TURN - slow)
                except Refused as refusal:
                    now.end(refusal=refusal)
                    del windows[index]
                    continue
                if measurement is None:
                    now.end()
                    del windows[index]
                else:
                    windows[index].append(measurement)
        for index, measurements in windows.items():
            # The losses are those of weights that other plans have trained.
            plan, measurement = self.given[index], replace(joined(measurements), losses=())
            now.choose(index, plan)
            now.results = [(plan, measurement)]
            now.by_steps[plan] = measurement
            now.end()
