"""The search: ask, launch, record, tell, until nothing better is likely."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from autofit import endings
from autofit import study as studies
from autofit.asked import SearchOptions
from autofit.exceptions import NothingFits, ScriptError, UsageError, WorkerError
from autofit.flight import Doubt, Flight, once, together
from autofit.ladder import rungs
from autofit.mirror import Mirror
from autofit.plan import Plan
from autofit.progress import (
    FactsKnown,
    LaunchStarted,
    LevelsLeftOut,
    Line,
    Listener,
    Remeasuring,
    Result,
    SizeMeasured,
    TrialEnded,
)
from autofit.reference import Reference, leading
from autofit.results import fits, ranked, result_of
from autofit.rules import BLAMED, culprit, dominated, judged
from autofit.space import Reason, Space, space
from autofit.storage import (
    Owner,
    Purpose,
    State,
    Store,
    StudyKey,
    StudyRecord,
    TrialRecord,
)
from autofit.strategies import Facts, Hardware
from autofit.worker import meter
from autofit.worker.pool import Pool
from autofit.worker.records import (
    LaunchEnded,
    LaunchEvent,
    LaunchRequest,
    Learned,
    Measured,
    Trace,
    Traced,
    TrialReport,
    Uncontained,
    Verdict,
)

TOGETHER = 3
"""Plans that go into one launch: start-up is paid once, and what was learned still counts."""
LAUNCH_SECONDS = 900.0
"""A launch that takes longer is ended."""
HEARTBEAT = 10.0
"""Seconds between two renewals of the lease on running trials."""
UNCONTAINED = "what the script writes to disk is really written: no overlay is allowed here"
BREAKS = 3
"""Workers that may break before the search gives up."""
LATE_STEPS = 50
"""Steps the neutral plan must survive where it is not known at which step a plan failed."""
FINALISTS = 3
"""Plans that get a chance to hold in a fresh process."""


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
        self._stored_seconds = 0.0
        self._pool: Pool | None = None
        self._flights: dict[int, Flight] = {}
        self._broken = 0
        self._warned = False
        self._safe_steps = 0
        self._alone: frozenset[Plan] = frozenset()
        """Whose loss looked wrong after other plans: to be launched first in a process."""
        self._left_out: tuple[Reason, ...] = ()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            for flight in self._flights.values():
                self._release(flight)
            if error is not None:
                self._keep_seconds()
        finally:
            self._stack.close()

    def run(self) -> Result:
        """Search, confirm the winner, return it."""
        self._drive(self._propose)
        self._require_baseline()
        if not ranked(self._finished(), self._study.budget):
            asked = self._options.timeout if self._late() else None
            endings.give_up(self._finished(), self._study.budget, asked)
        self._confirm()
        self._keep_seconds()
        result = result_of(self._store, self._store.study(self._study.id))
        assert result is not None, "a confirmed plan is a result"
        return result

    # --- opening ---------------------------------------------------------------------------

    def _open(self) -> None:
        options = self._options
        device = meter.default_device()
        hardware = meter.hardware(device)
        budget = studies.budget(device, hardware, options.memory, options.headroom)
        key = studies.key(options, hardware)
        self._device, self._hardware = device, hardware
        self._store = self._stack.enter_context(Store(options.storage))
        self._study = self._open_study(key, hardware, budget, fresh=options.fresh)
        if (other := self._store.holder(self._study)) is not None:
            raise UsageError(
                f"process {other.pid} on {other.host} is searching this study already:"
                " wait for it, or start another with --fresh"
            )
        self._store.reclaim(self._study)
        if not options.fresh and endings.failed(self._finished()):  # there is nothing to carry on
            self._study = self._open_study(key, hardware, budget, fresh=True)
        self._slots = options.gpus or 1 if device == "cuda" else 1
        resumed = len(self._finished())
        self._tell(studies.opened(self._study, options, slots=self._slots, resumed=resumed))
        if self._study.facts is not None:
            self._tell(FactsKnown(facts=self._study.facts))
        for number, trial in enumerate(self._finished()):
            self._announce(number, trial, slot=0)
        found = self._store.reference(self._study)
        self._reference = Reference(found, lambda line: self._tell(Line(text=line)))
        self._mirror = Mirror(self._store, self._study)
        self._mirror.catch_up(self._store.trials(self._study, purpose=Purpose.SEARCH))

    def _open_study(
        self, key: StudyKey, hardware: Hardware, budget: int, *, fresh: bool
    ) -> StudyRecord:
        return self._store.open_study(
            key,
            script=self._options.script,
            hardware=hardware,
            budget=budget,
            versions=studies.versions(),
            fresh=fresh,
        )

    def _workers(self) -> Pool:
        """Return the pool, started when the first launch needs it."""
        if self._pool is None:
            pool = Pool(self._slots, self._device, self._options.address)
            self._pool = self._stack.enter_context(pool)
        return self._pool

    # --- proposing -------------------------------------------------------------------------

    def _propose(self) -> tuple[Plan, ...]:
        """Return the plans of the next launch; none when nothing better is likely."""
        finished = self._finished()
        flying = {trial.plan for flight in self._flights.values() for trial in flight.trials}
        if self._awaited(flying) or self._spent(len(finished) + len(flying)):
            return ()
        known = {trial.plan for trial in finished} | flying
        candidates = [plan for plan in self._space().plans() if plan not in known]
        if Plan() not in known:
            beside = [plan for plan in candidates if plan.fixed == Plan()]
            return (Plan(), *beside[: self._room(0) - 1])
        self._require_baseline()
        batch = self._study.facts.batch if self._study.facts else None
        candidates = [plan for plan in candidates if dominated(plan, finished, batch) is None]
        if (first := self._leading(candidates)) is not None:
            beside = [plan for plan in candidates if together(plan, [first], self._alone)]
            return (first, *beside[: self._room(len(known)) - 1])
        self._mirror.enqueue(rungs(Plan(), candidates))
        chosen: list[Plan] = []
        while len(chosen) < self._room(len(known)):
            plan = self._mirror.ask([p for p in candidates if together(p, chosen, self._alone)])
            if plan is None:
                break
            chosen.append(plan)
        return tuple(chosen)

    def _leading(self, candidates: Sequence[Plan]) -> Plan | None:
        """Return the plan that goes first, to be the reference, where the script does not fit."""
        if self._reference.trace is not None or self._baseline() is Verdict.MEASURED:
            return None
        return leading(candidates, self._finished(), self._study.facts)

    def _awaited(self, flying: set[Plan]) -> bool:
        """Return whether the launch that becomes the reference, or shows there is none, is out."""
        exact = {plan for plan in flying if leading([plan], (), self._study.facts)}
        return Plan() in flying or bool(exact and self._leading([*exact]))

    def _space(self) -> Space:
        found = space(
            self._hardware,
            self._study.facts or Facts(),
            allow=self._options.allow,
            only=self._options.only,
            without=self._options.without,
            refused=self._study.left_out,
        )
        if self._study.facts is not None and found.left_out != self._left_out:
            new = tuple(reason for reason in found.left_out if reason not in self._left_out)
            self._left_out = found.left_out
            if new:
                self._tell(LevelsLeftOut(reasons=new))
        return found

    def _room(self, known: int) -> int:
        """Return how many plans may still go into this launch."""
        most = self._options.trials
        return TOGETHER if most is None else min(TOGETHER, most - known)

    def _spent(self, trials: int) -> bool:
        most = self._options.trials
        return self._late() or (most is not None and trials >= most)

    def _late(self) -> bool:
        return self._options.timeout is not None and self._lap() > self._options.timeout

    # --- driving ---------------------------------------------------------------------------

    def _drive(
        self, propose: Callable[[], tuple[Plan, ...]], purpose: Purpose = Purpose.SEARCH
    ) -> None:
        """Keep every slot busy with what is proposed, until nothing is and nothing runs."""
        while True:
            for slot in [each for each in range(self._slots) if each not in self._flights]:
                if not (plans := propose()):
                    break
                self._launch(slot, plans, purpose)
            if not self._flights:
                return
            for slot, happening in self._workers().events(timeout=HEARTBEAT):
                self._hear(slot, happening)
            self._store.heartbeat(self._owner)

    def _launch(self, slot: int, plans: Sequence[Plan], purpose: Purpose) -> None:
        self._workers()  # where there are none to be had, no trial is begun
        number = self._store.next_launch(self._study)
        trials = self._store.add_trials(
            self._study, plans, launch=number, owner=self._owner, purpose=purpose
        )
        self._flights[slot] = Flight(trials)
        self._submit(slot, self._request(plans, purpose))

    def _request(self, plans: Sequence[Plan], purpose: Purpose) -> LaunchRequest:
        return LaunchRequest(
            script=self._options.script,
            plans=tuple(plans),
            device=self._device,
            budget=self._study.budget,
            timeout=self._deadline(purpose),
            whole_fits=self._baseline() is Verdict.MEASURED,
        )

    def _submit(self, slot: int, request: LaunchRequest) -> None:
        self._workers().submit(slot, request)
        self._tell(LaunchStarted(slot=slot, plans=request.plans))

    def _deadline(self, purpose: Purpose) -> float:
        """Return the seconds a launch may take; the last word is not cut short by --timeout."""
        if self._options.timeout is None or purpose is Purpose.CONFIRM:
            return LAUNCH_SECONDS
        return max(1.0, min(LAUNCH_SECONDS, self._options.timeout - self._lap()))

    def _hear(self, slot: int, happening: LaunchEvent | WorkerError) -> None:
        flight = self._flights[slot]
        if flight.steps:
            self._hear_reference(slot, flight, happening)
            return
        match happening:
            case Uncontained():
                if not self._warned:
                    self._warned = True
                    self._tell(Line(text=UNCONTAINED))
            case Learned(facts=facts):
                self._learn(facts)
            case Measured(index=index, measurement=measurement):
                plan = flight.trials[index].plan
                self._tell(SizeMeasured(slot=slot, plan=plan, measurement=measurement))
            case Traced(index=index, trace=trace):
                flight.traces[index] = trace
            case TrialReport():
                flight.reported += 1
                if not flight.spoilt:
                    self._judge(slot, flight, happening)
            case LaunchEnded():
                self._landed(slot, happening)
            case WorkerError():
                self._worker_broke(slot, happening)

    def _worker_broke(self, slot: int, error: WorkerError) -> None:
        self._release(self._flights.pop(slot))
        self._broken += 1
        if self._broken > BREAKS:
            raise error
        self._tell(Line(text=f"{error}; trying again"))

    def _landed(self, slot: int, ended: LaunchEnded) -> None:
        """Close a launch: what it did not reach is planned again, unless it never can be."""
        flight = self._flights[slot]
        if flight.doubted is not None:
            self._run_reference(slot, flight.doubted, ended.steps, flight)
            return
        first = flight.trials[0]
        if flight.reported == 0 and first.plan.neutral and first.purpose is Purpose.SEARCH:
            self._release(self._flights.pop(slot))
            seen = bool((self._study.facts or Facts()).roots)
            raise ScriptError(endings.too_short(self._options.script, ended.steps, seen=seen))
        if flight.reported == 0:
            reason = f"the script ended after {ended.steps} steps, before a size was measured"
            report = TrialReport(index=0, plan=first.plan, verdict=Verdict.REFUSED, reason=reason)
            self._finish(first, report, slot)
        self._release(self._flights.pop(slot))
        self._keep_seconds()

    def _release(self, flight: Flight, *, but: TrialRecord | None = None) -> None:
        running = {t.id for t in self._store.trials(self._study, state=State.RUNNING)}
        for trial in flight.trials:
            if trial.id in running and trial != but:
                self._store.release(trial)

    # --- whose fault -----------------------------------------------------------------------

    def _judge(self, slot: int, flight: Flight, report: TrialReport) -> None:
        """Finish a trial, or put off what only another run of the reference can tell.

        That the script as it is was measured says no more than that its few steps went well.
        """
        trial, trace = flight.trials[report.index], flight.traces.get(report.index)
        facts = self._study.facts
        trace = self._reference.adopt(trial, report, trace, facts) or trace
        judged = self._reference.judged(report, trace, facts)
        failed = report.verdict is Verdict.PLAN_FAILED and report.blamed is None
        if judged is None:
            self._alone |= {trial.plan}
            flight.spoilt = True
        elif judged.verdict is Verdict.DRIFTED and self._reference.trace is not None:
            flight.doubt(Doubt(trial, report, trace, drifted=True))
        elif failed and self._baseline() is Verdict.MEASURED:
            flight.doubt(Doubt(trial, report))
        else:
            self._finish(trial, judged, slot, trace)

    def _run_reference(self, slot: int, doubt: Doubt, steps: int, flight: Flight) -> None:
        """Run the reference past the step at which the doubted trial failed or drifted."""
        self._release(flight, but=doubt.trial)
        steps = steps or LATE_STEPS
        known = self._reference.repeats is not None or not doubt.drifted
        if steps <= self._safe_steps and known:
            self._flights.pop(slot)
            self._settle(doubt, slot)
            return
        self._flights[slot] = Flight((doubt.trial,), doubted=doubt, steps=steps)
        reason = "its training differs" if doubt.drifted else doubt.report.reason
        self._tell(Line(text=f"{doubt.trial.plan}: {reason}: does the script do so by itself?"))
        self._store.next_launch(self._study)
        plan = self._reference.plan if doubt.drifted else Plan()
        self._submit(slot, replace(self._request((plan,), Purpose.CONFIRM), steps=steps))

    def _hear_reference(
        self, slot: int, flight: Flight, happening: LaunchEvent | WorkerError
    ) -> None:
        doubt = flight.doubted
        assert doubt is not None
        match happening:
            case Traced(trace=trace):
                self._reference.again(trace)
            case TrialReport(verdict=Verdict.SCRIPT_FAILED):
                self._finish(doubt.trial, replace(happening, plan=doubt.trial.plan), slot)
            case TrialReport():
                self._reference.longer(happening)
            case LaunchEnded():
                self._safe_steps = max(self._safe_steps, flight.steps)
                self._flights.pop(slot)
                self._settle(doubt, slot)
            case WorkerError():
                self._worker_broke(slot, happening)

    def _settle(self, doubt: Doubt, slot: int) -> None:
        """Finish a trial whose doubt another run of the reference has resolved."""
        judged = self._reference.judged(doubt.report, doubt.trace, self._study.facts)
        self._finish(doubt.trial, judged or doubt.report, slot)

    def _learn(self, facts: Facts) -> None:
        """Keep new facts, unless a launch that has just begun knows less than an earlier one."""
        if facts.optimizers or self._study.facts is None or not self._study.facts.roots:
            self._study = self._store.set_facts(self._study, facts)
            self._tell(FactsKnown(facts=facts))

    # --- recording -------------------------------------------------------------------------

    def _finish(
        self, trial: TrialRecord, report: TrialReport, slot: int, trace: Trace | None = None
    ) -> None:
        cut = report.verdict is Verdict.TIMED_OUT and self._late()  # by the search's own time
        if report.verdict is Verdict.INTERRUPTED or cut:
            return  # released with its flight, and planned again
        report = judged(report, self._options.script, self._baseline())
        kept = trace if trace is self._reference.trace else None
        trial = self._store.finish(trial, report, trace=kept)
        if trial.purpose is Purpose.SEARCH:
            self._mirror.tell(trial)
            self._announce(len(self._finished()) - 1, trial, slot)
        if report.verdict is Verdict.SCRIPT_FAILED:
            raise ScriptError(f"{self._options.script.target}: {report.reason}", report.traceback)
        ruled_out = culprit(report, self._finished())
        if report.verdict in BLAMED and ruled_out:
            self._study = self._store.leave_out(self._study, *ruled_out, report.reason)

    def _announce(self, number: int, trial: TrialRecord, slot: int) -> None:
        assert trial.report is not None, "a finished trial has a report"
        leading = ranked(self._finished(), self._study.budget)[:1]
        best = any(first.id == trial.id for first in leading)
        self._tell(TrialEnded(number=number, slot=slot, report=trial.report, best=best))

    def _finished(self) -> tuple[TrialRecord, ...]:
        return self._store.trials(self._study, state=State.FINISHED, purpose=Purpose.SEARCH)

    def _baseline(self) -> Verdict | None:
        return next((t.verdict for t in self._finished() if t.plan.neutral), None)

    def _require_baseline(self) -> None:
        """Raise when the script as it is says that no plan can help."""
        seen = bool((self._study.facts or Facts()).roots)
        endings.of_baseline(self._finished(), self._options.script, self._study.budget, seen=seen)

    # --- ending ----------------------------------------------------------------------------

    def _confirm(self) -> None:
        """Measure the winner again in a fresh process; if it fails, the runner-up."""
        failed = 0
        for trial in ranked(self._finished(), self._study.budget):
            assert trial.report is not None
            plan = trial.report.best or trial.plan
            if not self._confirmations(plan, Verdict.DRIFTED) and not self._held(plan):
                self._tell(Remeasuring(plan=plan))
                self._drive(once(plan), Purpose.CONFIRM)
                failed += not self._confirmations(plan, Verdict.DRIFTED)
            if self._held(plan):
                return
            self._tell(Line(text=endings.did_not_hold(plan, self._confirmations(plan))))
            if failed == FINALISTS:
                break
        raise NothingFits("no plan that fitted in the search fitted again in a fresh process")

    def _held(self, plan: Plan) -> bool:
        """Return whether a plan fitted when it was measured again."""
        return any(fits(each, self._study.budget) for each in self._confirmations(plan))

    def _confirmations(self, plan: Plan, *verdicts: Verdict) -> list[TrialRecord]:
        finished = self._store.trials(self._study, state=State.FINISHED, purpose=Purpose.CONFIRM)
        mine = [trial for trial in finished if trial.plan == plan]
        return [trial for trial in mine if not verdicts or trial.verdict in verdicts]

    def _keep_seconds(self) -> None:
        """Add the time since it was last kept: a kill loses no more than one launch's."""
        lap = self._lap()
        self._store.add_seconds(self._study, lap - self._stored_seconds)
        self._stored_seconds = lap

    def _lap(self) -> float:
        return time.monotonic() - self._started
