"""Runs one launch from the parent: starts the child, reports its events, ends it. Imports no torch.

The child is a new interpreter that runs the harness by its path. ``AUTOFIT_EVENTS_FD`` and
``AUTOFIT_CONTROL_FD`` hold the descriptors of its two pipes. The child receives one ``ChildSpec``
with ``multiprocessing.connection.Connection.recv`` and sends events with ``Connection.send``.
``lifeline.watch`` ends it when the control pipe breaks. The parent replies to ``Asking`` with an
``Answer``. A launch consists of one such process, or of several, the ranks (``group.py``).
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from autofit.worker.launch import other_uid
from autofit.worker.launch.child import EXIT_SECONDS, python
from autofit.worker.launch.environment import child_environment
from autofit.worker.launch.group import Group
from autofit.worker.launch.guard import BRIEFLY, Guard
from autofit.worker.launch.reaper import SESSION, processes, with_descendants
from autofit.worker.launch.tasks import Hosts, tasks
from autofit.worker.oom import classifier
from autofit.worker.records.inspection import Inspected
from autofit.worker.records.phases import Seconds, added, filled, without
from autofit.worker.records.trials import (
    LOST,
    Answer,
    Asking,
    BandwidthMeasured,
    ChildSpec,
    Entered,
    Event,
    Finished,
    GraphsGrow,
    LaunchEnded,
    LaunchEvent,
    LaunchRequest,
    Learned,
    Measured,
    Measurement,
    OutOfMemory,
    Paused,
    PlanEnded,
    PlanStarted,
    Printed,
    Proven,
    Raised,
    Shortage,
    Traced,
    TrialReport,
    Uncontained,
    Verdict,
    Verified,
)

HARNESS = Path(__file__).resolve().parents[1] / "harness" / "__main__.py"
"""The program that runs the user's script in its own process."""

_EXTERNAL_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a user or a batch system sends; they say nothing about the script."""
_LAST_LINES = 20
"""Lines at the end of the output that are searched for the cause of a failure."""


def launch(
    request: LaunchRequest,
    *,
    harness: Path = HARNESS,
    environment: Mapping[str, str] | None = None,
    scratch: str | None = None,
    lone: bool = False,
    control: Control | None = None,
    guard: Guard | None = None,
    uid: int | None = None,
    started: Started | None = None,
    hosts: Hosts | None = None,
) -> Iterator[LaunchEvent]:
    """Start the processes of ``request`` and yield their events and reports, ``LaunchEnded`` last.

    When the iterator ends or is closed, all processes of the launch are gone. If a card has less
    free memory than the budget, no process is started.

    A prepared process runs up to its first device call. There it waits for the request of
    ``Control.use``. If it has ended or does not suit that request, a new process takes its place.

    ``environment``: the user's (default ``os.environ``). ``scratch``: parent folder of temporary
    files (default: the system's). ``lone``: as for ``Child``. ``control``: lets another thread stop
    the launch or answer it. ``guard``: remembers the slot's cards from earlier launches. ``uid``:
    under which the processes run, if this process is root. ``started``: the prepared process, if it
    was started before, beside no other launch. ``hosts``: where replicas run, if some run on other
    hosts than this one.
    Raises ``WorkerError`` when a process cannot be started.
    """
    user = os.environ if environment is None else environment
    control = control or Control()
    guard = guard or Guard.of(request.device, user)
    begin = partial(
        start,
        harness=harness,
        environment=user,
        scratch=scratch,
        lone=lone,
        uid=uid,
        hosts=hosts,
    )
    done = yield from _run(begin, control, guard, request, started)
    if not done and (used_for := control.wait_for_use()) is not None:
        yield from _run(begin, control, guard, used_for)
    elif not done:
        yield LaunchEnded(steps=0, stopped=False, seconds=0.0)


@dataclass(frozen=True, slots=True)
class Started:
    """The processes of a launch."""

    group: Group
    folder: Path
    """Of their temporary files; ``end`` removes it."""
    since: float
    """When they were started, by ``time.monotonic``."""

    def end(self) -> None:
        """End the processes and remove their files."""
        self.group.end()
        shutil.rmtree(self.folder, ignore_errors=True)


def start(
    request: LaunchRequest,
    *,
    harness: Path = HARNESS,
    environment: Mapping[str, str],
    scratch: str | None = None,
    lone: bool = False,
    uid: int | None = None,
    session: str | None = None,
    hosts: Hosts | None = None,
) -> Started:
    """Start the processes of ``request``; the parameters are those of ``launch``.

    ``session``: marks the processes (``reaper.SESSION``); by default the mark of this process.
    Raises ``WorkerError`` when a process cannot be started.
    """
    since = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="autofit-", dir=scratch))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        variables = child_environment(request, environment, folder)
        if mark := session or os.environ.get(SESSION):
            variables[SESSION] = mark
        overlay = folder / "overlay"
        overlay.mkdir()
        if uid is not None:
            variables = other_uid.with_own_shim(variables, folder)
            other_uid.give(folder, uid)
        spec = ChildSpec(request=request, scratch=str(overlay))
        ready = tasks(spec, variables, hosts)
        group = Group.start(python(harness), ready, lone=lone, uid=uid)
        stack.pop_all()
    return Started(group, folder, since)


def _run(
    begin: Callable[[LaunchRequest], Started],
    control: Control,
    guard: Guard,
    request: LaunchRequest,
    started: Started | None = None,
) -> Generator[LaunchEvent, None, bool]:
    """Run the processes of ``request``; return ``False`` if they were prepared and never used."""
    since = time.monotonic()
    if not request.prepared and (lost := guard.wait(request.budget)):
        yield LaunchEnded(steps=0, stopped=False, seconds=time.monotonic() - since, lost=lost)
        return True
    alone = not request.prepared or started is not None
    started = started or begin(request)
    with ExitStack() as stack:
        stack.callback(started.end)
        group = started.group
        group.limit(None if request.prepared else request.timeout)
        reporter = _TrialReporter(request, guard, since, alone=alone)
        control.attach(group, reporter)
        for event in group.events():
            if isinstance(event, Asking):
                group.limit(None)  # the time until the answer is not the child's
            yield from reporter.forward(event, group)
            if reporter.taken:
                group.kill()
            if reporter.final is not None:
                group.linger(0.0 if reporter.stopped else EXIT_SECONDS)
        control.detach()
        if request.prepared and not reporter.was_used(group.timed_out or control.stopped):
            return False
        end = _End.of(group, reporter.kills, control.stopped)
        yield from reporter.close(end)
    lost = guard.wait(request.budget)
    seconds = time.monotonic() - reporter.start
    yield LaunchEnded(
        steps=reporter.steps,
        stopped=reporter.stopped,
        seconds=seconds,
        seconds_by_phase=filled(reporter.seconds_by_phase, seconds),
        output=end.output,
        oom_killed=end.oom_killed,
        taken=reporter.taken,
        lost=lost,
    )
    return True


class Control:
    """Lets another thread stop a running launch, answer it, or use a prepared one."""

    def __init__(self) -> None:
        self.stopped = False
        self._group: Group | None = None
        self._reporter: _TrialReporter | None = None
        self._lock = threading.Lock()
        self._used_for: LaunchRequest | None = None
        self._decided = threading.Event()
        """Set once a prepared launch is used or stopped."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the running processes that the launcher started."""
        with self._lock:
            return () if self._group is None else self._group.pids

    def stop(self) -> None:
        """Kill the launch now, or when it starts; its plan is reported as interrupted."""
        with self._lock:
            self.stopped = True
            self._decided.set()
            if self._group is not None:
                self._group.kill()

    def use(self, request: LaunchRequest, guard: Guard) -> bool:
        """Use a prepared launch for ``request``; return whether its process still runs.

        The launch before has ended. Its memory is waited for, as before any launch.
        """
        occupied = bool(guard.wait(request.budget))
        with self._lock:
            self._used_for = request
            self._decided.set()
            if self._group is None:
                return False
            if occupied:  # the new process that takes its place reports it
                self._group.kill()
            else:
                self._hand_over(self._group, request)
            return True

    def _hand_over(self, group: Group, request: LaunchRequest) -> None:
        assert self._reporter is not None, "it is attached with the group"
        if not self._reporter.suits(request):
            group.kill()
            return
        self._reporter.use(request)
        group.limit(request.timeout)
        group.answer(request)

    def wait_for_use(self) -> LaunchRequest | None:
        """Wait until the launch is used, and return the request; ``None`` if it is stopped."""
        self._decided.wait()
        return None if self.stopped else self._used_for

    def answer(self, answer: Answer) -> None:
        """Answer a launch that asks; do nothing if the launch has ended."""
        with self._lock:
            if self._group is None or self._reporter is None:
                return
            self._reporter.answered(answer)
            self._group.limit(answer.timeout)
            self._group.answer(answer)

    def attach(self, group: Group, reporter: _TrialReporter) -> None:
        """Connect this object to ``group``; kill ``group`` if ``stop`` was called before."""
        with self._lock:
            self._group, self._reporter = group, reporter
            if self.stopped:
                group.kill()
            elif reporter.prepared and self._used_for is not None:
                self._hand_over(group, self._used_for)

    def detach(self) -> None:
        """Disconnect this object from a group that has ended."""
        with self._lock:
            self._group = self._reporter = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How the processes ended, from what their parent can see."""

    returncode: int
    """Exit code, or minus the signal that ended it; 0 for a process that the launcher killed."""
    timed_out: bool
    interrupted: bool
    oom_kills: int
    """Processes that the kernel's OOM killer ended during the launch: its own or others."""
    output: str
    label: str = ""
    """The rank that failed, with several ranks: ``"rank 1: "``."""
    waiting: str = ""
    """Which ranks waited for which; empty if none did."""

    @classmethod
    def of(cls, group: Group, kills_before: int, interrupted: bool) -> _End:
        """Return how ``group``, which has ended, came to its end."""
        return cls(
            returncode=group.returncode or 0,
            timed_out=group.timed_out,
            interrupted=interrupted,
            oom_kills=classifier.oom_kills() - kills_before,
            output=str(group.tail),
            label=group.label,
            waiting=group.waiting,
        )

    @property
    def oom_killed(self) -> bool:
        """Whether the kernel's OOM killer ended it."""
        return self.returncode == -signal.SIGKILL and self.oom_kills > 0

    @property
    def killed(self) -> bool:
        """Whether a signal ended it that users and batch systems send."""
        return -self.returncode in _EXTERNAL_SIGNALS

    @property
    def out_of_memory(self) -> bool:
        """Whether its exit code and last lines of output show that memory ran out."""
        last = "\n".join(self.output.splitlines()[-_LAST_LINES:])
        kind = classifier.classify_exit(self.returncode, last, oom_kills=self.oom_kills).kind
        return kind is classifier.Kind.OOM

    def __str__(self) -> str:
        if self.returncode >= 0:
            return f"{self.label}exited with code {self.returncode}"
        number = -self.returncode
        known = number in {*signal.Signals}
        return f"{self.label}killed by signal {number}" + (
            f" ({signal.Signals(number).name})" if known else ""
        )


class _TrialReporter:
    """Tracks the running plan and turns the child's events into reports for the controller."""

    def __init__(self, request: LaunchRequest, guard: Guard, start: float, *, alone: bool) -> None:
        """``alone``: whether no launch ran beside the process."""
        self.start = start
        self._alone = alone
        self.kills = classifier.oom_kills()
        self.prepared = request.prepared
        self._at_start = request.plans[0]
        self._used = self._paused = False
        self.final: Raised | Finished | None = None
        self.taken = ""
        """Which processes took the card's memory, if that made memory run out.

        Later events are ignored.
        """
        self._plans = list(request.given)
        self._timeout = request.timeout
        self._budget = request.budget
        self._guard = guard
        self._index = 0  # failures before the first plan starts count for the first plan
        self._reported: set[int] = set()
        self._startup = 0.0
        self.seconds_by_phase: Seconds = ()
        """Of the process, as far as it has reported them."""
        self._of_trials: Seconds = ()
        """Those of the reported plans."""
        self._measurements: list[Measurement] = []
        self._shortage: OutOfMemory | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps of the script, if it reported its end; else 0."""
        return self.final.steps if self.final is not None else 0

    @property
    def stopped(self) -> bool:
        """Whether the harness stopped the script after the last plan."""
        return isinstance(self.final, Finished) and self.final.stopped

    def suits(self, request: LaunchRequest) -> bool:
        """Return whether the prepared process can be used for ``request``."""
        return request.plans[0].at_start == self._at_start

    def use(self, request: LaunchRequest) -> None:
        """Record that the prepared process is used for ``request``, from now on."""
        self.start, self.kills = time.monotonic(), classifier.oom_kills()
        self._plans, self._timeout, self._used = list(request.given), request.timeout, True

    def was_used(self, ended_from_here: bool) -> bool:
        """Return whether the end of a prepared process says something about the plan.

        Its script may fail beside another process, for example because both want the same port.
        """
        return self._used and (self._alone or self._paused or ended_from_here)

    def answered(self, answer: Answer) -> None:
        """Record the answer that the child is about to get."""
        self._timeout = answer.timeout
        self._plans += answer.plans

    def forward(self, event: Event, group: Group) -> Iterator[LaunchEvent]:
        """Record an event of ``group``; yield what the controller needs of it."""
        if self.taken:
            return
        match event:
            case Shortage() if self._was_taken(event.out_of_memory, group):
                pass
            case Raised() if event.starved() and self._was_taken(event.out_of_memory, group):
                pass
            case PlanEnded() if event.report.index in self._reported:
                pass  # another rank has reported the same end
            case Paused():
                self._paused = True
            case PlanStarted():
                self._index, self._startup = event.index, event.startup_seconds
                if not self._alone:  # only what the launch still waited for
                    self._startup = min(self._startup, time.monotonic() - self.start)
                self.seconds_by_phase = event.seconds_by_phase
                self._measurements, self._shortage = [], None
            case Measured():
                self._measurements.append(event.measurement)
                yield event
            case Shortage():
                self._shortage = event.out_of_memory
                yield event
            case (
                Inspected()
                | Learned()
                | Proven()
                | Verified()
                | BandwidthMeasured()
                | GraphsGrow()
                | Traced()
                | Uncontained()
                | Entered()
                | Printed()
                | Asking()
            ):
                yield event
            case PlanEnded():
                self._reported.add(event.report.index)
                self._of_trials = added(self._of_trials, event.report.seconds_by_phase)
                self.seconds_by_phase = self._of_trials
                startup = min(self._startup, event.report.startup_seconds)
                yield replace(event.report, startup_seconds=startup)
            case Raised():
                self.final, self._index = event, event.index
                self.seconds_by_phase = event.seconds_by_phase
            case Finished():
                self.final, self.seconds_by_phase = event, event.seconds_by_phase

    def close(self, end: _End) -> Iterator[TrialReport]:
        """Yield the report of the plan that was running when the child ended, if there was one."""
        if self._index in self._reported or self._index >= len(self._plans):
            return
        if self.taken:
            yield self._report(Verdict.INTERRUPTED, self.taken)
            return
        match self.final:
            case Raised() as raised:
                yield self._raised(raised, end)
            case Finished() if end.returncode <= 0:
                pass  # a crash during teardown, after the script's end, says nothing about the plan
            case None if end.interrupted:
                yield self._report(Verdict.INTERRUPTED, "interrupted")
            case None if end.timed_out:
                yield self._timed_out(end)
            case _ if end.out_of_memory:
                yield self._starved(OutOfMemory(phase="outside the model", message=str(end)))
            case _ if end.returncode:
                yield replace(self._failed(str(end), end.output), killed=end.killed)

    def _timed_out(self, end: _End) -> TrialReport:
        """Return the report of a plan that timed out; sizes measured before then count."""
        reason = f"not done within {round(self._timeout, 1):g} s"
        reason += f": {end.waiting}" if end.waiting else ""
        report = self._report(Verdict.TIMED_OUT, reason, traceback=end.output)
        return self._so_far(reason, self._measurements) or report

    def _so_far(self, reason: str, sizes: Sequence[Measurement]) -> TrialReport | None:
        """Return a report of the sizes measured so far; ``None`` if they say nothing of the plan.

        A plan with a part that is made for one batch size is first measured without that part.
        Those measurements belong to the plan without it.
        """
        plan = self._plans[self._index]
        if not sizes or plan.unsized != plan:
            return None
        done = sorted(sizes, key=lambda each: each.seconds, reverse=True)
        best = plan
        if plan.open:
            best = done[-1].plan(plan)
        report = self._report(Verdict.MEASURED, reason)
        return replace(report, measurements=tuple(done), best=best)

    def _was_taken(self, short: OutOfMemory, group: Group) -> bool:
        """Return whether other processes made memory run out on the reporting rank's card.

        If so, ``taken`` names them.
        """
        if short.room is None:
            return False
        own = {process.pid for process in with_descendants(group.pids, processes())}
        beside = own - {*group.speaker.pids}
        if self._guard.taken(short.room, self._budget, beside, group.speaker.rank):
            self.taken = self._guard.takers(own)
        return bool(self.taken)

    def _raised(self, raised: Raised, end: _End) -> TrialReport:
        reason = raised.message.partition("\n")[0]
        if raised.kind == LOST:
            return replace(self._report(Verdict.INTERRUPTED, reason), killed=True)
        if raised.starved(end.oom_kills):
            shortage = replace(raised.out_of_memory, message=reason)
            return self._starved(shortage)
        report = self._failed(reason, raised.traceback)
        return replace(report, blamed=raised.blamed, own=raised.own)

    def _starved(self, shortage: OutOfMemory) -> TrialReport:
        if shortage.room is None and self._guard.wait(self._budget, BRIEFLY):
            self.taken = self._guard.takers([])  # memory ran out before CUDA had started
            return self._report(Verdict.INTERRUPTED, self.taken)
        self._shortage = shortage
        size, level = shortage.micro_batch, shortage.checkpointing
        outside = shortage.phase == "outside the model"  # where a probe does not look
        leaner = [
            each
            for each in self._measurements
            if each.leaner(size, level) and not (each.probed and outside)
        ]
        report = self._report(Verdict.OUT_OF_MEMORY, shortage.message)
        return self._so_far("", leaner) or report

    def _failed(self, reason: str, traceback: str) -> TrialReport:
        neutral = self._plans[self._index].neutral
        verdict = Verdict.SCRIPT_FAILED if neutral else Verdict.PLAN_FAILED
        return self._report(verdict, reason, traceback=traceback)

    def _report(self, verdict: Verdict, reason: str, *, traceback: str = "") -> TrialReport:
        return TrialReport(
            index=self._index,
            plan=self._plans[self._index],
            verdict=verdict,
            reason=reason,
            measurements=tuple(self._measurements),
            out_of_memory=self._shortage,
            traceback=traceback,
            startup_seconds=self._startup,
            seconds_by_phase=without(
                # Seconds that the process has not reported count as ``other``.
                filled(self.seconds_by_phase, time.monotonic() - self.start),
                self._of_trials,
            ),
        )
