"""The search: ask, launch, record, tell, until nothing better is likely."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Self

from autofit.analysis.pruning import within
from autofit.analysis.ranking import result_of
from autofit.analysis.result import Result
from autofit.exceptions import ScriptError, WorkerError
from autofit.plan import Plan
from autofit.storage import Owner, Purpose, State, Store, TrialRecord
from autofit.tuning import messages
from autofit.tuning import study as studies
from autofit.tuning.cluster_slots import muster
from autofit.tuning.confirmation import Confirming
from autofit.tuning.history import Ledger
from autofit.tuning.launches import MOMENT, Doubt, Flight, Flights, in_turn
from autofit.tuning.notices import (
    FactsKnown,
    Line,
    Listener,
    Remeasuring,
    SizeMeasured,
    TrialDropped,
    TrialStarted,
)
from autofit.tuning.options import SearchOptions
from autofit.tuning.proposals import Proposer
from autofit.worker.records.trials import (
    Answer,
    Asking,
    LaunchEnded,
    LaunchEvent,
    LaunchRequest,
    Learned,
    Measured,
    Proven,
    Traced,
    TrialReport,
    Uncontained,
    Verdict,
    Verified,
)

PLAN_SECONDS = 900.0
"""A launch that spends longer on one plan, its start included, is ended."""
HEARTBEAT = 10.0
"""Seconds between two renewals of the lease on running trials."""
UNCONTAINED = "what the script writes to disk is really written: no overlay is allowed here"
AGAIN = 2
"""Times that a plan is run again whose worker was lost under it."""
KILLED_AGAIN = 1
"""Times that a plan is run again whose process was killed from outside."""
BREAKS = 3 * (AGAIN + 1)
"""Workers a slot lost on end, with no plan heard out in between, at which a search gives up."""
LATE_STEPS = 50
"""Steps the neutral plan must survive where it is not known at which step a plan failed."""


def search(options: SearchOptions, listener: Listener = lambda notice: None) -> Result:
    """Find the fastest plan that fits, and store it.

    Raises ``ScriptError`` when the script fails by itself, ``NothingFits`` when no plan fits,
    ``UsageError`` for what cannot be done as asked, ``StorageError`` and ``WorkerError``.
    """
    with Search(options, listener) as running:
        return running.run()


class Search:
    """One search of one study; a context manager that ends its processes."""

    def __init__(self, options: SearchOptions, listener: Listener) -> None:
        self._options = options
        self._tell = listener
        self._owner = Owner.current()
        self._started = time.monotonic()
        self._flights = Flights()
        self._broken: Counter[tuple[Plan, Purpose]] = Counter()
        """Workers lost, by what ran there."""
        self._killed: Counter[tuple[Plan, Purpose]] = Counter()
        """Processes killed from outside, by what ran there."""
        self._on_end = 0
        self._safe_steps = 0
        self._ahead: set[int] = set()  # slots on which a launch was started before its plan
        self._spared = False  # one of them for the last word
        self._served: object = None  # what was known when launches that wait were last answered
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            for flight in self._flights.values():
                self._release(flight)
            if error is not None:
                self._ledger.keep_seconds()
        finally:
            self._stack.close()

    def run(self) -> Result:
        """Search, confirm the winner, return it."""
        ledger = self._ledger
        self._drive(self._proposer.next)
        ledger.require_baseline()
        if not ledger.ranked():
            asked = self._options.timeout if ledger.late() else None
            messages.give_up(ledger.finished(), ledger.study.budget, asked)
        self._proposer.tell_limit()
        last = Confirming(ledger, self._proposer, self._again, self._crew.slots)
        last.confirm()
        while self._proposer.wants_launch():  # what was ruled out or slower may have hidden others
            self._drive(self._proposer.next)
            last.confirm()
        self._proposer.tell_limit()
        ledger.keep_seconds()
        result = result_of(self._store, self._store.study(ledger.study.id), self._options.horizon)
        assert result is not None, "a confirmed plan is a result"
        return result

    # --- opening ---------------------------------------------------------------------------

    def _open(self) -> None:
        options = self._options
        self._crew = muster(options, self._stack)
        hardware = self._crew.hardware
        budget = studies.budget(self._crew.free, hardware, options.memory, options.headroom)
        self._workers = partial(self._crew.workers, self._stack)  # started for the first launch
        self._store = self._stack.enter_context(Store(options.storage))
        study, before = studies.taken(self._store, options, hardware, budget, self._crew.versions)
        self._tell(studies.opened(study, options, devices=self._crew.devices, resumed=len(before)))
        for line in (*options.lines, *self._crew.lines):
            self._tell(Line(text=line))
        if study.facts is not None:
            self._tell(FactsKnown(facts=study.facts))
        self._ledger = Ledger(self._store, study, options, self._tell, self._started)
        for number, trial in enumerate(before):
            self._ledger.announce(number, trial, slot=0)
        self._proposer = Proposer(self._ledger, hardware)

    # --- driving ---------------------------------------------------------------------------

    def _drive(
        self, propose: Callable[[Plan | None], Plan | None], purpose: Purpose = Purpose.SEARCH
    ) -> None:
        """Keep every slot busy with what is proposed, until nothing is and nothing runs."""
        while True:
            while self._crew.tend(self._ledger.say, idle=not self._flights):
                self._store.heartbeat(self._owner)
            if purpose is Purpose.SEARCH:
                self._serve()
            soon = purpose is Purpose.SEARCH and self._flights.about_to_ask
            for slot in () if soon else self._crew.idle(self._flights):
                if (plan := propose(None)) is None:
                    break
                self._launch(slot, plan, purpose)
            if purpose is Purpose.SEARCH:
                self._look_ahead()
            if len(self._flights.waiting) == len(self._flights):
                return
            for slot, happening in self._workers().events(timeout=MOMENT if soon else HEARTBEAT):
                self._hear(slot, happening)
            self._store.heartbeat(self._owner)

    def _launch(self, slot: int, plan: Plan, purpose: Purpose) -> None:
        """Start a launch; in the search, one that asks for more plans when it is done."""
        self._workers()  # where there are none to be had, no trial is begun
        number = self._store.next_launch(self._ledger.study)
        trial = self._begin(plan, number, purpose)
        self._flights[slot] = Flight([trial], launch=number, ahead=plan.fixed)
        request = self._request(plan, purpose)
        self._submit(slot, replace(request, converses=purpose is Purpose.SEARCH))

    def _look_ahead(self) -> None:
        """Start the script on idle slots before there is a plan for them: that may take longest.

        While what plans are compared with is awaited; at the end, one for the last word, for which
        a launch that waits ends.
        """
        idle, ranked = self._crew.idle(self._flights), self._ledger.ranked()
        if self._crew.slots == 1 or not self._flights:
            return
        if self._proposer.awaiting():
            for slot in set(idle) - self._ahead:
                self._start_ahead(slot, Flight([]))
            return
        waiting, spared = self._flights.waiting, self._spared or self._flights.about_to_ask
        if len(idle) + len(waiting) < 2 or not ranked or spared:
            return
        unused = [flight for flight in waiting.values() if not flight.trials]
        self._spared = bool(unused or idle)
        if unused:
            unused[0].spare = True
        elif idle:
            self._start_ahead(idle[-1], Flight([], ahead=ranked[0].plan.fixed, spare=True))
        elif not self._flights.ending:
            slot = max(waiting, key=lambda each: len(waiting[each].fixed.changes))
            self._give(slot, waiting[slot], None, Purpose.SEARCH)

    def _drop_what_is_outdone(self) -> None:
        """End what the search would only wait for: by what is known now it would not be begun."""
        running = {slot: flight for slot, flight in self._flights.items() if flight.runs}
        if self._crew.slots > 1 and running and self._proposer.outdone():
            for slot, flight in running.items():
                flight.over = True
                self._workers().cancel(slot)
                self._tell(TrialDropped(slot=slot, plan=flight.trials[-1].plan))

    def _start_ahead(self, slot: int, flight: Flight) -> None:
        self._ahead.add(slot)
        flight.launch = self._store.next_launch(self._ledger.study)
        request = self._request(flight.ahead, Purpose.SEARCH)
        self._workers().submit(slot, replace(request, converses=True, waits=True))
        self._flights[slot] = flight

    def _serve(self) -> None:
        """Answer launches that wait for a plan, where there may be another answer than before."""
        before, self._served = self._served, self._proposer.known()
        if before == self._served:
            return
        for slot, flight in self._flights.waiting.items():
            assert flight.asking is not None, "it waits"
            self._answer(slot, flight, flight.asking)
        self._drop_what_is_outdone()

    def _answer(self, slot: int, flight: Flight, asking: Asking) -> None:
        """Give a launch that asks its next plan; none where its weights may be spoilt."""
        plan, more = None, flight.purpose is Purpose.SEARCH and not (flight.spoilt or flight.over)
        if more and not flight.spare:
            plan = self._proposer.next(flight.fixed, fresh=asking.fresh)
        flight.asking = asking
        if plan is not None or not more or not self._waits(flight):  # there may be one later
            self._give(slot, flight, plan, flight.purpose)

    def _waits(self, flight: Flight) -> bool:
        """Return whether a launch for which there is no plan now is kept: a start is saved.

        While others run, unless the slot is wanted for a plan in a new one.
        """
        if not flight.trials and (flight.spare or self._proposer.awaiting()):
            return True
        wanted = not self._flights.ending and not self._crew.idle(self._flights)
        return self._flights.busy and not (wanted and self._proposer.wants_launch())

    def _give(self, slot: int, flight: Flight, plan: Plan | None, purpose: Purpose) -> None:
        """Tell a launch that has asked which plan is next; it ends where there is none."""
        flight.asking, flight.over = None, plan is None
        if plan is not None:
            flight.trials.append(self._begin(plan, flight.launch, purpose))
        answer = Answer(
            plan=plan,
            timeout=self._deadline(purpose),
            whole_fits=self._ledger.baseline() is Verdict.MEASURED,
            proven=self._ledger.evidence.proven,
        )
        self._workers().answer(slot, answer)
        if plan is not None:
            self._turned(slot, plan)

    def _begin(self, plan: Plan, launch: int, purpose: Purpose) -> TrialRecord:
        """Write a trial down before it runs: a kill finds it there."""
        return self._store.add_trials(
            self._ledger.study, [plan], launch=launch, owner=self._owner, purpose=purpose
        )[0]

    def _request(self, plan: Plan, purpose: Purpose) -> LaunchRequest:
        return LaunchRequest(
            script=self._options.script,
            plans=(plan,),
            device=self._crew.device,
            budget=self._ledger.study.budget,
            timeout=self._deadline(purpose),
            whole_fits=self._ledger.baseline() is Verdict.MEASURED,
            ranks=self._crew.ranks,
            proven=self._ledger.evidence.proven,
        )

    def _submit(self, slot: int, request: LaunchRequest) -> None:
        self._workers().submit(slot, request)
        self._turned(slot, request.plans[0])

    def _turned(self, slot: int, plan: Plan) -> None:
        self._tell(TrialStarted(slot=slot, plan=plan, on=self._crew.label(slot)))

    def _deadline(self, purpose: Purpose) -> float:
        """Return the seconds a plan may take; the last word is not cut short by --timeout."""
        if self._options.timeout is None or purpose is Purpose.CONFIRM:
            return PLAN_SECONDS
        return max(1.0, min(PLAN_SECONDS, self._options.timeout - self._ledger.lap()))

    def _hear(self, slot: int, happening: LaunchEvent | WorkerError) -> None:
        flight = self._flights[slot]
        if isinstance(happening, LaunchEnded) and (
            self._crew.heed(slot, happening, self._ledger.say) or flight.killed
        ):
            self._release(self._flights.pop(slot))
            self._ledger.keep_seconds()
            return
        if isinstance(happening, TrialReport) and happening.killed:
            happening = self._was_killed(flight, happening)
        if flight.killed and not isinstance(happening, WorkerError):
            return
        if flight.steps:
            self._hear_reference(slot, flight, happening)
            return
        match happening:
            case Uncontained():
                self._ledger.say_once(UNCONTAINED)
            case Learned(facts=facts):
                self._ledger.learn(facts)
            case Proven() | Verified():
                self._ledger.verified(happening)
            case Measured(index=index, measurement=measurement):
                plan = flight.trials[index].plan
                self._tell(SizeMeasured(slot=slot, plan=plan, measurement=measurement))
            case Traced(index=index, trace=trace):
                flight.traces[index] = trace
            case TrialReport():
                flight.note(happening)
                self._on_end = 0
                self._judge(slot, flight, happening)
            case Asking():
                self._answer(slot, flight, happening)
            case LaunchEnded():
                self._landed(slot, happening)
            case WorkerError():
                self._worker_broke(slot, happening)

    def _was_killed(self, flight: Flight, report: TrialReport) -> TrialReport:
        """Have a plan run again whose process was killed from outside; blame it the next time."""
        ran = report.plan, flight.trials[report.index].purpose
        self._killed[ran] += 1
        if self._killed[ran] > KILLED_AGAIN:
            return replace(report, reason=f"{report.reason}, again")
        flight.killed = True
        self._ledger.say(messages.killed(report))
        return report

    def _worker_broke(self, slot: int, error: WorkerError) -> None:
        """Run what was lost with a worker again; record a plan that loses its worker each time."""
        flight = self._flights.pop(slot)
        running = flight.trials[flight.reported :][:1]  # none, if it was lost between two plans
        self._on_end += 1
        times = 0
        for trial in running:
            self._broken[trial.plan, trial.purpose] += 1
            times = self._broken[trial.plan, trial.purpose]
        if times > AGAIN and self._ledger.finished():
            trial = running[0]
            reason = f"its worker was lost {times} times; the last time: {error}"
            report = TrialReport(
                index=flight.reported, plan=trial.plan, verdict=Verdict.PLAN_FAILED, reason=reason
            )
            self._ledger.finish(trial, report, slot)
        self._release(flight)
        if times > AGAIN and not self._ledger.finished():
            raise WorkerError(
                f"{error}; under {running[0].plan} the {times}th time,"
                " and nothing else has run yet: the same command tries again"
            )
        if self._on_end >= BREAKS * self._crew.slots:  # one machine may hold many
            on_end = f"that makes {self._on_end} on end"
            raise WorkerError(f"{error}; {on_end}: something else is wrong")
        if times <= AGAIN:
            self._ledger.say(f"{error}; what ran there is tried again")

    def _landed(self, slot: int, ended: LaunchEnded) -> None:
        """Close a launch: what it did not reach is planned again, unless it never can be."""
        flight = self._flights[slot]
        if flight.doubted is not None:
            self._run_reference(slot, flight.doubted, ended.steps, flight)
            return
        if not flight.trials:  # it was started ahead, and nothing came of it
            self._flights.pop(slot)
            return
        first = flight.trials[0]
        if flight.reported == 0 and first.plan.neutral and first.purpose is Purpose.SEARCH:
            self._release(self._flights.pop(slot))
            seen = self._ledger.seen()
            raise ScriptError(messages.too_short(self._options.script, ended.steps, seen=seen))
        if flight.reported == 0:
            reason = f"the script ended after {ended.steps} steps, before a size was measured"
            report = TrialReport(index=0, plan=first.plan, verdict=Verdict.REFUSED, reason=reason)
            self._ledger.finish(first, report, slot)
        self._release(self._flights.pop(slot))
        self._ledger.keep_seconds()

    def _release(self, flight: Flight, *, but: TrialRecord | None = None) -> None:
        running = {t.id for t in self._store.trials(self._ledger.study, state=State.RUNNING)}
        for trial in flight.trials:
            if trial.id in running and trial != but:
                self._store.release(trial)
                self._ledger.mirror.drop(trial.plan)

    # --- whose fault -----------------------------------------------------------------------

    def _judge(self, slot: int, flight: Flight, report: TrialReport) -> None:
        """Finish a trial, or put off what only another run of the reference can tell.

        That the script as it is was measured says no more than that its few steps went well.
        """
        trial, trace = flight.trials[report.index], flight.traces.get(report.index)
        facts = self._ledger.study.facts
        report = within(report, facts, self._options.allow)
        trace = self._ledger.reference.adopt(trial, report, trace, facts) or trace
        judged = self._ledger.reference.judged(report, trace, facts)
        failed = report.verdict is Verdict.PLAN_FAILED and report.blamed is None
        if judged is None:
            self._ledger.alone |= {trial.plan}
            flight.spoilt = True
        elif judged.verdict is Verdict.DRIFTED and self._ledger.reference.trace is not None:
            flight.doubt(Doubt(trial, report, trace, drifted=True))
        elif failed and self._ledger.baseline() is Verdict.MEASURED:
            flight.doubt(Doubt(trial, report))
        else:
            self._ledger.finish(trial, judged, slot, trace)

    def _run_reference(self, slot: int, doubt: Doubt, steps: int, flight: Flight) -> None:
        """Run the reference past the step at which the doubted trial failed or drifted."""
        self._release(flight, but=doubt.trial)
        steps = steps or LATE_STEPS
        known = self._ledger.reference.repeats is not None or not doubt.drifted
        if steps <= self._safe_steps and known:
            self._flights.pop(slot)
            self._settle(doubt, slot)
            return
        self._flights[slot] = Flight([doubt.trial], doubted=doubt, steps=steps)
        reason = "its training differs" if doubt.drifted else doubt.report.reason
        self._ledger.say(messages.doubted(doubt.trial.plan, reason))
        self._store.next_launch(self._ledger.study)
        plan = self._ledger.reference.plan if doubt.drifted else Plan()
        self._submit(slot, replace(self._request(plan, Purpose.CONFIRM), steps=steps))

    def _hear_reference(
        self, slot: int, flight: Flight, happening: LaunchEvent | WorkerError
    ) -> None:
        doubt = flight.doubted
        assert doubt is not None
        match happening:
            case Traced(trace=trace):
                self._ledger.reference.again(trace)
            case TrialReport(verdict=Verdict.SCRIPT_FAILED):
                self._ledger.finish(doubt.trial, replace(happening, plan=doubt.trial.plan), slot)
            case TrialReport():
                self._ledger.reference.longer(happening)
            case LaunchEnded():
                self._safe_steps = max(self._safe_steps, flight.steps)
                self._flights.pop(slot)
                self._settle(doubt, slot)
            case WorkerError():
                self._worker_broke(slot, happening)

    def _settle(self, doubt: Doubt, slot: int) -> None:
        """Finish a trial whose doubt another run of the reference has resolved."""
        judged = self._ledger.reference.judged(doubt.report, doubt.trace, self._ledger.study.facts)
        self._ledger.finish(doubt.trial, judged or doubt.report, slot)

    # --- ending ----------------------------------------------------------------------------

    def _again(self, *plans: Plan) -> None:
        """Measure plans in fresh processes; once more where that was none of their doing."""
        plans = tuple(plan for plan in plans if not self._ledger.confirmations(plan))
        for plan in plans:
            self._tell(Remeasuring(plan=plan))
        before = -1
        while before < self._undone():
            before = self._undone()
            left = [plan for plan in plans if not self._ledger.confirmations(plan)]
            for slot, flight in self._flights.items():  # those that wait
                unused = () if flight.trials else left
                alike = next((plan for plan in unused if plan.follows(flight.fixed)), None)
                left = [plan for plan in left if plan != alike]
                self._give(slot, flight, alike, Purpose.CONFIRM)
            self._drive(in_turn(left), Purpose.CONFIRM)

    def _undone(self) -> int:
        """Return how often a launch came to nothing by no doing of its plan."""
        return self._crew.interrupted + self._broken.total() + self._killed.total()
