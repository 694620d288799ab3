"""Sends plans to the workers of a search: to new launches, and to those that ask for more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from autofit.analysis.verdicts import best_plan
from autofit.plan import Plan
from autofit.storage import Owner, Purpose, TrialRecord
from autofit.tuning.history import LAUNCHES, History
from autofit.tuning.launches import RunningLaunch, RunningLaunches
from autofit.tuning.local_slots import LocalSlots
from autofit.tuning.notices import TrialStarted
from autofit.worker.cluster.pool import Pool
from autofit.worker.records.phases import RAY
from autofit.worker.records.trials import Answer, LaunchEvent, LaunchRequest, Stage, Verdict


class Dispatcher:
    """Starts the launches of a search, and answers them."""

    def __init__(
        self, history: History, slots: LocalSlots, launches: RunningLaunches, stack: ExitStack
    ) -> None:
        """``launches``: those that run, by slot. ``stack``: closes the workers."""
        self.owner = Owner.current()
        self.started_ahead: set[int] = set()
        """Slots on which a launch was started before there was a plan for it."""
        self._history, self._slots = history, slots
        self._launches, self._stack = launches, stack

    def workers(self) -> Pool:
        """Return the pool of workers, which takes seconds to start."""
        with self._history.clock.within(RAY):
            return self._slots.workers(self._stack)

    def launch(self, slot: int, plan: Plan, purpose: Purpose) -> Iterable[LaunchEvent]:
        """Start a launch; in the search, one that asks for more plans afterwards.

        Returns its events, if it was started before and has ended.
        """
        pool = self.workers()  # raises if there are no workers, before a trial is stored
        number = self._history.store.next_launch(self._history.study)
        trial = self._begin(plan, number, purpose)
        self._launches[slot] = RunningLaunch([trial], number=number, ahead=plan.fixed)
        self._history.clock.enter(LAUNCHES)
        request = self.request(plan, purpose)
        if pool.first_ended:
            return pool.first_events(request)
        self.submit(slot, request)
        return ()

    def start_ahead(self, slot: int, launch: RunningLaunch) -> None:
        """Start a launch that waits for its first plan."""
        self.started_ahead.add(slot)
        launch.number = self._history.store.next_launch(self._history.study)
        request = self.request(launch.ahead, Purpose.SEARCH)
        self.workers().submit(slot, replace(request, waits=True))
        self._launches[slot] = launch

    def prepare(self) -> None:
        """Prepare a process beside a launch that measures, for the next plan that needs a new one.

        It starts with the levels that the fastest plan needs from the start: that plan is confirmed
        in a new process.
        """
        ranked = self._history.now.ranked
        plan = ranked[0].plan.at_start if ranked else Plan()
        for slot, launch in self._launches.items() if self._slots.prepares else ():
            if launch.runs and launch.stepped and launch.beside != plan:
                launch.beside = plan
                self.workers().prepare(slot, self.request(plan, Purpose.SEARCH))

    def submit(self, slot: int, request: LaunchRequest) -> None:
        """Start a launch."""
        self.workers().submit(slot, request)
        self.tell_started(slot, request.plans[0])

    def send_plan(
        self, slot: int, launch: RunningLaunch, plan: Plan | None, purpose: Purpose
    ) -> None:
        """Send a plan to a launch that asks; ``None`` ends the launch."""
        begun = [] if plan is None else [self._begin(plan, launch.number, purpose)]
        self.send(slot, launch, Stage.PROBE, begun)

    def send(
        self, slot: int, launch: RunningLaunch, stage: Stage, trials: Sequence[TrialRecord]
    ) -> None:
        """Answer a launch that asks; without ``trials`` it ends."""
        launch.asking, launch.over = None, not trials
        first = len(launch.trials)
        launch.trials += trials
        plans = tuple(each.plan if stage is Stage.PROBE else best_plan(each) for each in trials)
        if stage is not Stage.PROBE:
            launch.stages |= dict.fromkeys(range(first, len(launch.trials)), stage)
        answer = Answer(
            plans=plans,
            stage=stage,
            timeout=self._deadline(plans),
            whole_fits=self._history.now.baseline is Verdict.MEASURED,
            proven=self._history.evidence.proven,
        )
        self.workers().answer(slot, answer)
        for plan in plans:
            self.tell_started(slot, plan)

    def _begin(self, plan: Plan, launch: int, purpose: Purpose) -> TrialRecord:
        """Store a trial before it runs: a search that was killed finds it again."""
        return self._history.store.add_trials(
            self._history.study, [plan], launch=launch, owner=self.owner, purpose=purpose
        )[0]

    def request(self, plan: Plan, purpose: Purpose) -> LaunchRequest:
        """Return the request for a launch that begins with ``plan``."""
        replicas = plan.ranks
        return LaunchRequest(
            script=self._history.options.script,
            plans=(plan,),
            device=self._slots.device,
            budget=self._history.study.budget,
            timeout=self._deadline([plan]),
            converses=purpose is Purpose.SEARCH,
            whole_fits=self._history.now.baseline is Verdict.MEASURED,
            ranks=self._slots.ranks,
            measures_bandwidth=replicas > 1 and replicas not in self._history.bandwidths,
            proven=self._history.evidence.proven,
        )

    def tell_started(self, slot: int, plan: Plan) -> None:
        """Tell the listener that a plan begins."""
        self._history.tell(TrialStarted(slot=slot, plan=plan, on=self._slots.label(slot)))

    def _deadline(self, plans: Sequence[Plan]) -> float:
        """Return the seconds that ``plans`` may take together, before ``--timeout`` is over."""
        history, limit = self._history, sum(map(self._history.limit, plans))
        if history.options.timeout is None:
            return limit
        return max(1.0, min(limit, history.options.timeout - history.elapsed()))
