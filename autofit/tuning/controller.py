"""The search loop: propose a plan, launch it, record the result, until no plan is likely to win."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Self

from autofit.analysis.candidates import AskingLaunch
from autofit.analysis.ranking import result_of
from autofit.analysis.result import Result
from autofit.analysis.verdicts import within
from autofit.exceptions import ScriptError, WorkerError
from autofit.plan import Plan
from autofit.storage import Purpose, State, Store, TrialRecord
from autofit.tuning import messages
from autofit.tuning import study as studies
from autofit.tuning.cluster_slots import open_slots
from autofit.tuning.confirmation import Confirmation
from autofit.tuning.dispatch import Dispatcher
from autofit.tuning.history import LAUNCHES, History
from autofit.tuning.launches import (
    NEXT_REQUEST_SECONDS,
    Doubt,
    RunningLaunch,
    RunningLaunches,
    one_by_one,
)
from autofit.tuning.notices import (
    FactsKnown,
    Line,
    Listener,
    NewOutput,
    PhaseBegun,
    Remeasuring,
    SizeMeasured,
    StudyStarted,
    TrialDropped,
)
from autofit.tuning.options import SearchOptions
from autofit.tuning.proposals import Proposer
from autofit.worker.cluster.reservation import Reservation
from autofit.worker.records.phases import OTHER, RAY, Phases
from autofit.worker.records.trials import (
    MOST_PRINTED,
    Asking,
    BandwidthMeasured,
    Entered,
    GraphsGrow,
    LaunchEnded,
    LaunchEvent,
    Learned,
    Measured,
    Printed,
    Proven,
    Stage,
    Traced,
    TrialReport,
    Uncontained,
    Verdict,
    Verified,
)

HEARTBEAT = 10.0
"""Seconds between two heartbeats of the running trials."""
UNCONTAINED = (
    "The files that the script writes are not removed after a trial: this system allows no overlay."
)
SPANS = "Each training now spans {} devices."
RETRIES = 2
"""Maximum number of retries of a plan whose worker was lost."""
KILL_RETRIES = 1
"""Maximum number of retries of a plan whose process was killed from outside."""
MAX_LOST = 3 * (RETRIES + 1)
"""Workers lost in a row, for each slot, after which a search gives up."""
LATE_STEPS = 50
"""Steps that the neutral plan must complete if it is not known at which step a plan failed."""


def search(
    options: SearchOptions,
    listener: Listener = lambda notice: None,
    *,
    reserved: Reservation | None = None,
) -> Result:
    """Find the fastest plan that fits the budget, and store it.

    ``listener`` receives a notice for each event of the search. ``reserved``: the devices of the
    cluster at ``options.address`` on which trials run; by default the search takes free ones.
    Raises ``ScriptError`` if the script fails without a plan, ``NothingFits`` if no plan fits,
    ``UsageError`` for options that cannot be met, ``StorageError`` and ``WorkerError``.
    """
    with RunningSearch(options, listener, reserved) as running:
        return running.run()


class RunningSearch:
    """One search of one study. A context manager that ends the search's processes."""

    def __init__(
        self, options: SearchOptions, listener: Listener, reserved: Reservation | None = None
    ) -> None:
        self._options = options
        self._reserved = reserved
        self._tell = listener
        self._started = time.monotonic()
        self._clock = Phases(self._started, OTHER)
        self._launches = RunningLaunches()
        self._lost_workers: Counter[tuple[Plan, Purpose]] = Counter()
        """Number of lost workers, by the plan and purpose that ran there."""
        self._killed: Counter[tuple[Plan, Purpose]] = Counter()
        """Number of processes killed from outside, by the plan and purpose that ran there."""
        self._lost_in_a_row = 0
        """Workers lost in a row."""
        self._safe_steps = 0
        """Most steps that the reference has completed."""
        self._spare_kept = False
        """Whether one started process is kept idle for the confirmation."""
        self._answered_at: object = None
        """What was known when waiting launches were last answered."""
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
            for launch in self._launches.values():
                self._history.spent(launch.own_seconds())
                self._release(launch)
            if error is not None:
                self._history.store_seconds()
        finally:
            self._stack.close()

    def run(self) -> Result:
        """Search, confirm the winner and return it."""
        history = self._history
        if not self._proposer.has_spread:
            self._drive(self._proposer.next)
        history.require_baseline()
        self._spread()
        if not history.now.ranked:
            timeout = self._options.timeout if history.late() else None
            messages.give_up(history.now.finished, self._proposer.fallback_context(), timeout)
        self._proposer.tell_limit()
        last = Confirmation(history, self._proposer, self._confirm)
        last.confirm()
        while self._proposer.wants_launch():  # a failed confirmation can make others worthwhile
            self._drive(self._proposer.next)
            last.confirm()
        self._proposer.tell_limit()
        history.store_seconds()
        result = result_of(self._store, self._store.study(history.study.id), self._options.horizon)
        assert result is not None, "a confirmed plan is a result"
        return result

    def _spread(self) -> None:
        """Search on, with each training spread over all devices, if the options allow it."""
        if not self._proposer.spread():
            return
        for slot, launch in self._launches.items():  # all of them wait for a plan
            self._dispatcher.send_plan(slot, launch, None, Purpose.SEARCH)
        self._drive(lambda: None, Purpose.CONFIRM)  # until they have ended
        self._slots.span()
        self._history.say(SPANS.format(self._slots.spread))
        self._drive(self._proposer.next)

    # --- opening ---------------------------------------------------------------------------

    def _open(self) -> None:
        options = self._options
        with self._clock.within(RAY):
            self._slots = open_slots(options, self._stack, self._reserved)
        hardware = self._slots.hardware
        budget = studies.budget(self._slots.free, hardware, options.memory, options.headroom)
        self._store = self._stack.enter_context(Store(options.storage))
        study, before = studies.open_study(
            self._store,
            options,
            hardware,
            budget,
            self._slots.versions,
            self._slots.spread,
        )
        self._tell(
            StudyStarted(
                study=study.id,
                script=options.script,
                hardware=study.hardware,
                devices=self._slots.devices,
                budget=study.budget,
                asked=options.memory is not None,
                allow=str(options.allow),
                resumed=len(before),
            )
        )
        for line in (*options.lines, *self._slots.lines):
            self._tell(Line(text=line))
        if study.facts is not None:
            self._tell(FactsKnown(facts=study.facts))
        self._history = History(self._store, study, options, self._tell, self._started, self._clock)
        if options.sampler == "gp":
            self._history.say(messages.LEARNS_NOTHING)
        for trial in before:
            self._history.tell_ended(trial, slot=0)
        self._proposer = Proposer(
            self._history,
            hardware,
            spread=self._slots.spread,
            learns=self._reserved is not None and not before and not options.fresh,
        )
        self._dispatcher = Dispatcher(self._history, self._slots, self._launches, self._stack)
        first = self._dispatcher.request(Plan(), Purpose.SEARCH)
        if not before and self._slots.begin(self._stack, first):
            self._dispatcher.tell_started(0, Plan())
            self._tell(PhaseBegun(slot=0, phase=messages.STARTS))

    # --- driving ---------------------------------------------------------------------------

    def _drive(self, propose: Callable[[], Plan | None], purpose: Purpose = Purpose.SEARCH) -> None:
        """Keep every slot busy with proposed plans, until none is proposed and nothing runs."""
        while True:
            self._clock.enter(LAUNCHES if self._launches else OTHER)
            while self._slots.update(self._history.say, idle=not self._launches):
                self._store.heartbeat(self._dispatcher.owner)
            if purpose is Purpose.SEARCH:
                self._answer_waiting()
            soon = purpose is Purpose.SEARCH and self._launches.about_to_ask
            for slot in () if soon else self._slots.idle(self._launches):
                if (plan := propose()) is None:
                    break
                for event in self._dispatcher.launch(slot, plan, purpose):
                    self._handle_event(slot, event)
            if purpose is Purpose.SEARCH:
                self._start_early()
                self._dispatcher.prepare()
            if len(self._launches.waiting) == len(self._launches):
                return
            for slot, reported in self._dispatcher.workers().events(
                timeout=NEXT_REQUEST_SECONDS if soon else HEARTBEAT
            ):
                self._handle_event(slot, reported)
            self._store.heartbeat(self._dispatcher.owner)

    def _start_early(self) -> None:
        """Start the script on idle slots before there is a plan for them, to save start-up time.

        While the script is observed, this fills all idle slots. Later it keeps one started process
        idle for the final confirmation. If no slot is idle then, a waiting launch ends to free one.
        A search that will span devices needs another process for its confirmation.
        """
        idle, ranked = self._slots.idle(self._launches), self._history.now.ranked
        if self._slots.count == 1 or not self._launches:
            return
        if self._proposer.script_running():
            for slot in set(idle) - self._dispatcher.started_ahead:
                self._dispatcher.start_ahead(slot, RunningLaunch([]))
            return
        waiting, spared = (
            self._launches.waiting,
            self._spare_kept or self._launches.about_to_ask,
        )
        spared = spared or self._slots.spread > 1
        if len(idle) + len(waiting) < 2 or not ranked or spared:
            return
        unused = [launch for launch in waiting.values() if not launch.trials]
        self._spare_kept = bool(unused or idle)
        if unused:
            unused[0].spare = True
        elif idle:
            self._dispatcher.start_ahead(
                idle[-1], RunningLaunch([], ahead=ranked[0].plan.fixed, spare=True)
            )
        elif not self._launches.ending:
            slot = max(waiting, key=lambda each: len(waiting[each].fixed.changes))
            self._dispatcher.send_plan(slot, waiting[slot], None, Purpose.SEARCH)

    def _drop_losing_trials(self) -> None:
        """Stop the running trials if the cost model no longer expects any of them to win."""
        running = {slot: launch for slot, launch in self._launches.items() if launch.runs}
        if self._slots.count > 1 and running and self._proposer.nothing_worth_running():
            for slot, launch in running.items():
                launch.over = True
                self._dispatcher.workers().cancel(slot)
                self._tell(TrialDropped(slot=slot, plan=launch.trials[-1].plan))

    def _answer_waiting(self) -> None:
        """Answer launches that wait for a plan, if anything has changed since the last answer."""
        before, self._answered_at = self._answered_at, self._proposer.known()
        if before == self._answered_at:
            return
        for slot, launch in self._launches.waiting.items():
            assert launch.asking is not None, "a waiting launch has asked"
            self._answer(slot, launch, launch.asking)
        self._drop_losing_trials()

    def _answer(self, slot: int, launch: RunningLaunch, asking: Asking) -> None:
        """Send the next plan to a launch that asks; none if its weights may be damaged.

        If no plan is left to probe, the best ones are compared by real steps, and the winner is
        verified.
        """
        plan, more = None, launch.purpose is Purpose.SEARCH and not (launch.doubted or launch.over)
        here = AskingLaunch(launch.fixed, asking.fresh)
        if more and not launch.spare:
            plan = self._proposer.next(here)
        launch.asking = asking
        if plan is not None or not more:
            self._dispatcher.send_plan(slot, launch, plan, launch.purpose)
        elif not self._keep_waiting(launch):
            stage, trials = self._proposer.last_stage(here)
            self._dispatcher.send(slot, launch, stage, trials)

    def _keep_waiting(self, launch: RunningLaunch) -> bool:
        """Return whether to keep a launch without a plan, in case it gets one later.

        It is kept while others run, unless a plan that needs a new launch wants its slot.
        """
        if not launch.trials and (launch.spare or self._proposer.script_running()):
            return True
        wanted = not self._launches.ending and not self._slots.idle(self._launches)
        return self._launches.busy and not (wanted and self._proposer.wants_launch())

    def _handle_event(self, slot: int, event: LaunchEvent | WorkerError) -> None:
        launch = self._launches[slot]
        if isinstance(event, LaunchEnded):
            self._history.spent(launch.own_seconds(event))
            self._clock.enter(LAUNCHES if len(self._launches) > 1 else OTHER)
        if isinstance(event, LaunchEnded) and (
            self._slots.handle_end(slot, event, self._history.say) or launch.killed
        ):
            self._release(self._launches.pop(slot))
            self._history.store_seconds()
            self._slots.prepares &= launch.killed  # nothing runs beside launches if memory was lost
            return
        if isinstance(event, TrialReport) and event.killed:
            event = self._handle_kill(launch, event)
        if launch.killed and not isinstance(event, WorkerError):
            return
        launch.stepped |= isinstance(event, Measured)
        match event:
            case Entered(phase=phase):
                self._tell(PhaseBegun(slot=slot, phase=messages.DOES[phase]))
            case Printed(text=text) | LaunchEnded(output=text) if text:
                self._tell(NewOutput(slot=slot, text=text[-MOST_PRINTED:]))
        if launch.steps:
            self._handle_reference_event(slot, launch, event)
            return
        match event:
            case Uncontained():
                self._history.say_if_new(UNCONTAINED)
            case Learned(facts=facts):
                self._history.learn(facts)
            case Proven() | Verified():
                self._history.verified(event)
            case BandwidthMeasured():
                self._history.learn_bandwidth(event.ranks, event.bandwidth)
            case GraphsGrow(growth=growth):
                self._history.say_if_new(messages.keeps_graphs(self._options.script, growth))
            case Measured(index=index, measurement=measurement):
                plan = launch.trials[index].plan
                self._tell(SizeMeasured(slot=slot, plan=plan, measurement=measurement))
            case Traced(index=index, trace=trace):
                launch.traces[index] = trace
            case TrialReport():
                launch.note(event)
                self._lost_in_a_row = 0
                self._judge(slot, launch, event)
            case Asking():
                self._answer(slot, launch, event)
            case LaunchEnded():
                self._handle_end(slot, event)
            case WorkerError():
                self._handle_lost_worker(slot, event)

    def _handle_kill(self, launch: RunningLaunch, report: TrialReport) -> TrialReport:
        """Let a plan run again if its process was killed from outside; blame it the next time."""
        ran = report.plan, launch.trials[report.index].purpose
        self._killed[ran] += 1
        if self._killed[ran] > KILL_RETRIES:
            return replace(report, reason=f"{report.reason}, again")
        launch.killed = True
        self._history.say(messages.killed(report))
        return report

    def _handle_lost_worker(self, slot: int, error: WorkerError) -> None:
        """Let the plan of a lost worker run again; record a failure if it loses each worker."""
        launch = self._launches.pop(slot)
        self._history.spent(launch.own_seconds())
        running = next(iter(launch.trials[launch.reported :]), None)
        running = None if launch.reported in launch.stages else running
        self._lost_in_a_row += 1
        times = 0
        if running is not None:
            self._lost_workers[running.plan, running.purpose] += 1
            times = self._lost_workers[running.plan, running.purpose]
        blamed = running if times > RETRIES else None
        others_ran = bool(self._history.now.finished)
        if blamed is not None and others_ran:
            reason = f"its worker was lost {times} times; the last time: {error}"
            report = TrialReport(
                index=launch.reported, plan=blamed.plan, verdict=Verdict.PLAN_FAILED, reason=reason
            )
            self._history.finish(blamed, report, slot)
        self._release(launch)
        if blamed is not None and not others_ran:
            raise WorkerError(
                f"{error}. This happened {times} times under {blamed.plan}, before another plan"
                " ran: start the same command again"
            )
        if self._lost_in_a_row >= MAX_LOST * self._slots.count:  # one machine may hold many
            on_end = f"{self._lost_in_a_row} workers were lost in a row"
            raise WorkerError(f"{error}. {on_end}: run `autofit doctor`")
        if blamed is None:
            self._history.say(f"{error}. Its plan is tried again.")

    def _handle_end(self, slot: int, ended: LaunchEnded) -> None:
        """Handle the end of a launch: plans that it did not reach can be proposed again."""
        launch = self._launches[slot]
        if launch.doubted is not None:
            self._run_reference(slot, launch.doubted, ended.steps, launch)
            return
        if not launch.trials:  # it was started ahead and got no plan
            self._launches.pop(slot)
            return
        first = launch.trials[0]
        if launch.reported == 0 and first.plan.neutral and first.purpose is Purpose.SEARCH:
            self._release(self._launches.pop(slot))
            seen = self._history.seen()
            raise ScriptError(messages.too_short(self._options.script, ended.steps, seen=seen))
        if launch.reported == 0:
            reason = f"the script ended after {ended.steps} steps, before a size was measured"
            report = TrialReport(index=0, plan=first.plan, verdict=Verdict.REFUSED, reason=reason)
            self._history.finish(first, report, slot)
        self._release(self._launches.pop(slot))
        self._history.store_seconds()

    def _release(self, launch: RunningLaunch, *, but: TrialRecord | None = None) -> None:
        """Remove the unfinished trials of a launch from the store, except ``but``."""
        running = {t.id for t in self._store.trials(self._history.study, state=State.RUNNING)}
        for trial in launch.trials:
            if trial.id in running and trial != but:
                self._store.release(trial)

    # --- whose fault -----------------------------------------------------------------------

    def _judge(self, slot: int, launch: RunningLaunch, report: TrialReport) -> None:
        """Finish a trial, or postpone its verdict until the reference has run again.

        A measured neutral plan only shows that its few steps went well. The script itself may fail
        or change its loss later.
        """
        trial, trace = launch.trials[report.index], launch.traces.get(report.index)
        stage = launch.stages.get(report.index)
        failed = report.verdict is Verdict.PLAN_FAILED and report.blamed is None
        if failed and self._history.now.baseline is Verdict.MEASURED:
            launch.doubted = Doubt(trial, report)
            return
        if stage is not None:
            self._history.amend(trial, report, slot, checked=stage is Stage.CHECK)
            return
        facts = self._history.study.facts
        report = within(report, facts, self._options.allow)
        trace = self._history.reference.adopt(trial, report, trace) or trace
        judged = self._history.reference.compared(report, trace, facts)
        if judged.verdict is Verdict.DRIFTED and self._history.reference.trace is not None:
            launch.doubted = Doubt(trial, report, trace, drifted=True)
        else:
            self._history.finish(trial, judged, slot, trace)

    def _run_reference(self, slot: int, doubt: Doubt, steps: int, launch: RunningLaunch) -> None:
        """Run the reference as many steps as the doubted trial took to fail or drift."""
        self._release(launch, but=doubt.trial)
        steps = steps or LATE_STEPS
        known = self._history.reference.training.repeats is not None or not doubt.drifted
        if steps <= self._safe_steps and known:
            self._launches.pop(slot)
            self._settle(doubt, slot)
            return
        self._launches[slot] = RunningLaunch([doubt.trial], doubted=doubt, steps=steps)
        reason = "its training differs" if doubt.drifted else doubt.report.reason
        self._history.say(messages.doubted(doubt.trial.plan, reason))
        self._store.next_launch(self._history.study)
        plan = self._history.reference.plan if doubt.drifted else Plan()
        self._dispatcher.submit(
            slot, replace(self._dispatcher.request(plan, Purpose.CONFIRM), steps=steps)
        )

    def _handle_reference_event(
        self, slot: int, launch: RunningLaunch, event: LaunchEvent | WorkerError
    ) -> None:
        doubt = launch.doubted
        assert doubt is not None
        match event:
            case Traced(trace=trace):
                self._history.reference.run_again(trace)
            case TrialReport(verdict=Verdict.SCRIPT_FAILED):
                seconds = doubt.report.seconds_by_phase
                failed = replace(event, plan=doubt.trial.plan, seconds_by_phase=seconds)
                if doubt.trial.state is State.FINISHED:
                    self._history.amend(doubt.trial, failed, slot, checked=False)
                self._history.finish(doubt.trial, failed, slot)
            case TrialReport():
                self._history.reference.run_longer(event)
            case LaunchEnded():
                self._safe_steps = max(self._safe_steps, launch.steps)
                self._launches.pop(slot)
                self._settle(doubt, slot)
            case WorkerError():
                self._handle_lost_worker(slot, event)

    def _settle(self, doubt: Doubt, slot: int) -> None:
        """Finish a trial whose verdict waited for another run of the reference."""
        if doubt.trial.state is State.FINISHED:  # it failed after its probe
            self._history.amend(doubt.trial, doubt.report, slot, checked=False)
            return
        judged = self._history.reference.compared(
            doubt.report, doubt.trace, self._history.study.facts
        )
        self._history.finish(doubt.trial, judged, slot)

    # --- ending ----------------------------------------------------------------------------

    def _confirm(self, plan: Plan) -> None:
        """Confirm a plan in a new process; repeat a launch that was lost for another reason."""
        if self._history.now.confirmed(plan):
            return
        self._tell(Remeasuring(plan=plan))
        before = -1
        while before < self._lost_launches() and not self._history.now.confirmed(plan):
            before, left = self._lost_launches(), [plan]
            for slot, launch in self._launches.items():  # all of them wait for a plan
                suitable = bool(left) and not launch.trials and plan.follows(launch.fixed)
                given = left.pop() if suitable else None
                self._dispatcher.send_plan(slot, launch, given, Purpose.CONFIRM)
            self._drive(one_by_one(left), Purpose.CONFIRM)

    def _lost_launches(self) -> int:
        """Return the number of launches that were lost through no fault of their plan."""
        return self._slots.interrupted + self._lost_workers.total() + self._killed.total()
