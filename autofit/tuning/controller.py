"""The search: ask, launch, record, tell, until nothing better is likely."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Self

from autofit.analysis.ranking import result_of
from autofit.analysis.result import Result
from autofit.analysis.verdicts import within
from autofit.exceptions import ScriptError, WorkerError
from autofit.plan import Plan
from autofit.storage import Owner, Purpose, State, Store, TrialRecord
from autofit.tuning import messages
from autofit.tuning import study as studies
from autofit.tuning.cluster_slots import open_slots
from autofit.tuning.confirmation import Confirmation
from autofit.tuning.history import History
from autofit.tuning.launches import MOMENT, Doubt, RunningLaunch, RunningLaunches, in_turn
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
UNCONTAINED = (
    "The files that the script writes are not removed after a trial: this system allows no overlay."
)
AGAIN = 2
"""Times that a plan is run again whose worker was lost under it."""
KILLED_AGAIN = 1
"""Times that a plan is run again whose process was killed from outside."""
BREAKS = 3 * (AGAIN + 1)
"""Workers a slot lost on end, with no plan heard out in between, at which a search gives up."""
LATE_STEPS = 50
"""Steps the neutral plan must survive where it is not known at which step a plan failed."""


def search(options: SearchOptions, listener: Listener = lambda notice: None) -> Result:
    """Find the fastest plan that fits the budget, and store it.

    ``listener`` receives a notice for each event of the search.
    Raises ``ScriptError`` if the script fails without a plan, ``NothingFits`` if no plan fits,
    ``UsageError`` for options that cannot be met, ``StorageError`` and ``WorkerError``.
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
        self._launches = RunningLaunches()
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
            for launch in self._launches.values():
                self._release(launch)
            if error is not None:
                self._history.keep_seconds()
        finally:
            self._stack.close()

    def run(self) -> Result:
        """Search, confirm the winner, return it."""
        history = self._history
        self._drive(self._proposer.next)
        history.require_baseline()
        if not history.ranked():
            asked = self._options.timeout if history.late() else None
            messages.give_up(history.finished(), history.study.budget, asked)
        self._proposer.tell_limit()
        last = Confirmation(history, self._proposer, self._again, self._slots.count)
        last.confirm()
        while self._proposer.wants_launch():  # what was ruled out or slower may have hidden others
            self._drive(self._proposer.next)
            last.confirm()
        self._proposer.tell_limit()
        history.keep_seconds()
        result = result_of(self._store, self._store.study(history.study.id), self._options.horizon)
        assert result is not None, "a confirmed plan is a result"
        return result

    # --- opening ---------------------------------------------------------------------------

    def _open(self) -> None:
        options = self._options
        self._slots = open_slots(options, self._stack)
        hardware = self._slots.hardware
        budget = studies.budget(self._slots.free, hardware, options.memory, options.headroom)
        self._workers = partial(self._slots.workers, self._stack)  # started for the first launch
        self._store = self._stack.enter_context(Store(options.storage))
        study, before = studies.open_study(
            self._store, options, hardware, budget, self._slots.versions
        )
        self._tell(
            studies.study_started(study, options, devices=self._slots.devices, resumed=len(before))
        )
        for line in (*options.lines, *self._slots.lines):
            self._tell(Line(text=line))
        if study.facts is not None:
            self._tell(FactsKnown(facts=study.facts))
        self._history = History(self._store, study, options, self._tell, self._started)
        for number, trial in enumerate(before):
            self._history.announce(number, trial, slot=0)
        self._proposer = Proposer(self._history, hardware)

    # --- driving ---------------------------------------------------------------------------

    def _drive(
        self, propose: Callable[[Plan | None], Plan | None], purpose: Purpose = Purpose.SEARCH
    ) -> None:
        """Keep every slot busy with what is proposed, until nothing is and nothing runs."""
        while True:
            while self._slots.update(self._history.say, idle=not self._launches):
                self._store.heartbeat(self._owner)
            if purpose is Purpose.SEARCH:
                self._serve()
            soon = purpose is Purpose.SEARCH and self._launches.about_to_ask
            for slot in () if soon else self._slots.idle(self._launches):
                if (plan := propose(None)) is None:
                    break
                self._launch(slot, plan, purpose)
            if purpose is Purpose.SEARCH:
                self._look_ahead()
            if len(self._launches.waiting) == len(self._launches):
                return
            for slot, happening in self._workers().events(timeout=MOMENT if soon else HEARTBEAT):
                self._hear(slot, happening)
            self._store.heartbeat(self._owner)

    def _launch(self, slot: int, plan: Plan, purpose: Purpose) -> None:
        """Start a launch; in the search, one that asks for more plans when it is done."""
        self._workers()  # where there are none to be had, no trial is begun
        number = self._store.next_launch(self._history.study)
        trial = self._begin(plan, number, purpose)
        self._launches[slot] = RunningLaunch([trial], number=number, ahead=plan.fixed)
        request = self._request(plan, purpose)
        self._submit(slot, replace(request, converses=purpose is Purpose.SEARCH))

    def _look_ahead(self) -> None:
        """Start the script on idle slots before there is a plan for them: that may take longest.

        While what plans are compared with is awaited; at the end, one for the last word, for which
        a launch that waits ends.
        """
        idle, ranked = self._slots.idle(self._launches), self._history.ranked()
        if self._slots.count == 1 or not self._launches:
            return
        if self._proposer.awaiting():
            for slot in set(idle) - self._ahead:
                self._start_ahead(slot, RunningLaunch([]))
            return
        waiting, spared = self._launches.waiting, self._spared or self._launches.about_to_ask
        if len(idle) + len(waiting) < 2 or not ranked or spared:
            return
        unused = [launch for launch in waiting.values() if not launch.trials]
        self._spared = bool(unused or idle)
        if unused:
            unused[0].spare = True
        elif idle:
            self._start_ahead(idle[-1], RunningLaunch([], ahead=ranked[0].plan.fixed, spare=True))
        elif not self._launches.ending:
            slot = max(waiting, key=lambda each: len(waiting[each].fixed.changes))
            self._give(slot, waiting[slot], None, Purpose.SEARCH)

    def _drop_what_is_outdone(self) -> None:
        """End what the search would only wait for: by what is known now it would not be begun."""
        running = {slot: launch for slot, launch in self._launches.items() if launch.runs}
        if self._slots.count > 1 and running and self._proposer.outdone():
            for slot, launch in running.items():
                launch.over = True
                self._workers().cancel(slot)
                self._tell(TrialDropped(slot=slot, plan=launch.trials[-1].plan))

    def _start_ahead(self, slot: int, launch: RunningLaunch) -> None:
        self._ahead.add(slot)
        launch.number = self._store.next_launch(self._history.study)
        request = self._request(launch.ahead, Purpose.SEARCH)
        self._workers().submit(slot, replace(request, converses=True, waits=True))
        self._launches[slot] = launch

    def _serve(self) -> None:
        """Answer launches that wait for a plan, where there may be another answer than before."""
        before, self._served = self._served, self._proposer.known()
        if before == self._served:
            return
        for slot, launch in self._launches.waiting.items():
            assert launch.asking is not None, "it waits"
            self._answer(slot, launch, launch.asking)
        self._drop_what_is_outdone()

    def _answer(self, slot: int, launch: RunningLaunch, asking: Asking) -> None:
        """Give a launch that asks its next plan; none where its weights may be spoilt."""
        plan, more = None, launch.purpose is Purpose.SEARCH and not (launch.spoilt or launch.over)
        if more and not launch.spare:
            plan = self._proposer.next(launch.fixed, fresh=asking.fresh)
        launch.asking = asking
        if plan is not None or not more or not self._waits(launch):  # there may be one later
            self._give(slot, launch, plan, launch.purpose)

    def _waits(self, launch: RunningLaunch) -> bool:
        """Return whether a launch for which there is no plan now is kept: a start is saved.

        While others run, unless the slot is wanted for a plan in a new one.
        """
        if not launch.trials and (launch.spare or self._proposer.awaiting()):
            return True
        wanted = not self._launches.ending and not self._slots.idle(self._launches)
        return self._launches.busy and not (wanted and self._proposer.wants_launch())

    def _give(self, slot: int, launch: RunningLaunch, plan: Plan | None, purpose: Purpose) -> None:
        """Tell a launch that has asked which plan is next; it ends where there is none."""
        launch.asking, launch.over = None, plan is None
        if plan is not None:
            launch.trials.append(self._begin(plan, launch.number, purpose))
        answer = Answer(
            plan=plan,
            timeout=self._deadline(purpose),
            whole_fits=self._history.baseline() is Verdict.MEASURED,
            proven=self._history.evidence.proven,
        )
        self._workers().answer(slot, answer)
        if plan is not None:
            self._turned(slot, plan)

    def _begin(self, plan: Plan, launch: int, purpose: Purpose) -> TrialRecord:
        """Write a trial down before it runs: a kill finds it there."""
        return self._store.add_trials(
            self._history.study, [plan], launch=launch, owner=self._owner, purpose=purpose
        )[0]

    def _request(self, plan: Plan, purpose: Purpose) -> LaunchRequest:
        return LaunchRequest(
            script=self._options.script,
            plans=(plan,),
            device=self._slots.device,
            budget=self._history.study.budget,
            timeout=self._deadline(purpose),
            whole_fits=self._history.baseline() is Verdict.MEASURED,
            ranks=self._slots.ranks,
            proven=self._history.evidence.proven,
        )

    def _submit(self, slot: int, request: LaunchRequest) -> None:
        self._workers().submit(slot, request)
        self._turned(slot, request.plans[0])

    def _turned(self, slot: int, plan: Plan) -> None:
        self._tell(TrialStarted(slot=slot, plan=plan, on=self._slots.label(slot)))

    def _deadline(self, purpose: Purpose) -> float:
        """Return the seconds a plan may take; the last word is not cut short by --timeout."""
        if self._options.timeout is None or purpose is Purpose.CONFIRM:
            return PLAN_SECONDS
        return max(1.0, min(PLAN_SECONDS, self._options.timeout - self._history.lap()))

    def _hear(self, slot: int, happening: LaunchEvent | WorkerError) -> None:
        launch = self._launches[slot]
        if isinstance(happening, LaunchEnded) and (
            self._slots.handle_end(slot, happening, self._history.say) or launch.killed
        ):
            self._release(self._launches.pop(slot))
            self._history.keep_seconds()
            return
        if isinstance(happening, TrialReport) and happening.killed:
            happening = self._was_killed(launch, happening)
        if launch.killed and not isinstance(happening, WorkerError):
            return
        if launch.steps:
            self._hear_reference(slot, launch, happening)
            return
        match happening:
            case Uncontained():
                self._history.say_unless_said(UNCONTAINED)
            case Learned(facts=facts):
                self._history.learn(facts)
            case Proven() | Verified():
                self._history.verified(happening)
            case Measured(index=index, measurement=measurement):
                plan = launch.trials[index].plan
                self._tell(SizeMeasured(slot=slot, plan=plan, measurement=measurement))
            case Traced(index=index, trace=trace):
                launch.traces[index] = trace
            case TrialReport():
                launch.note(happening)
                self._on_end = 0
                self._judge(slot, launch, happening)
            case Asking():
                self._answer(slot, launch, happening)
            case LaunchEnded():
                self._landed(slot, happening)
            case WorkerError():
                self._worker_broke(slot, happening)

    def _was_killed(self, launch: RunningLaunch, report: TrialReport) -> TrialReport:
        """Have a plan run again whose process was killed from outside; blame it the next time."""
        ran = report.plan, launch.trials[report.index].purpose
        self._killed[ran] += 1
        if self._killed[ran] > KILLED_AGAIN:
            return replace(report, reason=f"{report.reason}, again")
        launch.killed = True
        self._history.say(messages.killed(report))
        return report

    def _worker_broke(self, slot: int, error: WorkerError) -> None:
        """Run what was lost with a worker again; record a plan that loses its worker each time."""
        launch = self._launches.pop(slot)
        running = launch.trials[launch.reported :][:1]  # none, if it was lost between two plans
        self._on_end += 1
        times = 0
        for trial in running:
            self._broken[trial.plan, trial.purpose] += 1
            times = self._broken[trial.plan, trial.purpose]
        if times > AGAIN and self._history.finished():
            trial = running[0]
            reason = f"its worker was lost {times} times; the last time: {error}"
            report = TrialReport(
                index=launch.reported, plan=trial.plan, verdict=Verdict.PLAN_FAILED, reason=reason
            )
            self._history.finish(trial, report, slot)
        self._release(launch)
        if times > AGAIN and not self._history.finished():
            raise WorkerError(
                f"{error}. This happened {times} times under {running[0].plan}, before another plan"
                " ran: start the same command again"
            )
        if self._on_end >= BREAKS * self._slots.count:  # one machine may hold many
            on_end = f"{self._on_end} workers were lost in a row"
            raise WorkerError(f"{error}. {on_end}: run `autofit doctor`")
        if times <= AGAIN:
            self._history.say(f"{error}. Its plan is tried again.")

    def _landed(self, slot: int, ended: LaunchEnded) -> None:
        """Close a launch: what it did not reach is planned again, unless it never can be."""
        launch = self._launches[slot]
        if launch.doubted is not None:
            self._run_reference(slot, launch.doubted, ended.steps, launch)
            return
        if not launch.trials:  # it was started ahead, and nothing came of it
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
        self._history.keep_seconds()

    def _release(self, launch: RunningLaunch, *, but: TrialRecord | None = None) -> None:
        running = {t.id for t in self._store.trials(self._history.study, state=State.RUNNING)}
        for trial in launch.trials:
            if trial.id in running and trial != but:
                self._store.release(trial)
                self._history.optuna_study.drop(trial.plan)

    # --- whose fault -----------------------------------------------------------------------

    def _judge(self, slot: int, launch: RunningLaunch, report: TrialReport) -> None:
        """Finish a trial, or put off what only another run of the reference can tell.

        That the script as it is was measured says no more than that its few steps went well.
        """
        trial, trace = launch.trials[report.index], launch.traces.get(report.index)
        facts = self._history.study.facts
        report = within(report, facts, self._options.allow)
        trace = self._history.reference.adopt(trial, report, trace, facts) or trace
        judged = self._history.reference.compared(report, trace, facts)
        failed = report.verdict is Verdict.PLAN_FAILED and report.blamed is None
        if judged is None:
            self._history.alone |= {trial.plan}
            launch.spoilt = True
        elif judged.verdict is Verdict.DRIFTED and self._history.reference.trace is not None:
            launch.doubt(Doubt(trial, report, trace, drifted=True))
        elif failed and self._history.baseline() is Verdict.MEASURED:
            launch.doubt(Doubt(trial, report))
        else:
            self._history.finish(trial, judged, slot, trace)

    def _run_reference(self, slot: int, doubt: Doubt, steps: int, launch: RunningLaunch) -> None:
        """Run the reference past the step at which the doubted trial failed or drifted."""
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
        self._submit(slot, replace(self._request(plan, Purpose.CONFIRM), steps=steps))

    def _hear_reference(
        self, slot: int, launch: RunningLaunch, happening: LaunchEvent | WorkerError
    ) -> None:
        doubt = launch.doubted
        assert doubt is not None
        match happening:
            case Traced(trace=trace):
                self._history.reference.run_again(trace)
            case TrialReport(verdict=Verdict.SCRIPT_FAILED):
                self._history.finish(doubt.trial, replace(happening, plan=doubt.trial.plan), slot)
            case TrialReport():
                self._history.reference.run_longer(happening)
            case LaunchEnded():
                self._safe_steps = max(self._safe_steps, launch.steps)
                self._launches.pop(slot)
                self._settle(doubt, slot)
            case WorkerError():
                self._worker_broke(slot, happening)

    def _settle(self, doubt: Doubt, slot: int) -> None:
        """Finish a trial whose doubt another run of the reference has resolved."""
        judged = self._history.reference.compared(
            doubt.report, doubt.trace, self._history.study.facts
        )
        self._history.finish(doubt.trial, judged or doubt.report, slot)

    # --- ending ----------------------------------------------------------------------------

    def _again(self, *plans: Plan) -> None:
        """Measure plans in fresh processes; once more where that was none of their doing."""
        plans = tuple(plan for plan in plans if not self._history.confirmations(plan))
        for plan in plans:
            self._tell(Remeasuring(plan=plan))
        before = -1
        while before < self._undone():
            before = self._undone()
            left = [plan for plan in plans if not self._history.confirmations(plan)]
            for slot, launch in self._launches.items():  # those that wait
                unused = () if launch.trials else left
                alike = next((plan for plan in unused if plan.follows(launch.fixed)), None)
                left = [plan for plan in left if plan != alike]
                self._give(slot, launch, alike, Purpose.CONFIRM)
            self._drive(in_turn(left), Purpose.CONFIRM)

    def _undone(self) -> int:
        """Return how often a launch came to nothing by no doing of its plan."""
        return self._slots.interrupted + self._broken.total() + self._killed.total()
