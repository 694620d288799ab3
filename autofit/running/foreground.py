"""Starts the script of ``autofit run`` in the foreground, as one process or several ranks.

This module decides what happens when one rank ends. If the rank ended well, the others go on. If it
failed, the others wait for it forever, so this module ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf
from multiprocessing.connection import Connection, Pipe, wait
from queue import Empty, SimpleQueue
from types import FrameType

from autofit.exceptions import WorkerError
from autofit.worker.launch.child import CONTROL_FD, EVENTS_FD, python
from autofit.worker.launch.group import Ended, listen, report_seconds
from autofit.worker.launch.launcher import HARNESS
from autofit.worker.launch.tasks import Rank, RankTask
from autofit.worker.records.trials import (
    Event,
    Finished,
    PlanEnded,
    Raised,
    Ran,
    Verdict,
)

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for ranks after another rank has failed."""
EXIT_SECONDS = 30.0
"""Seconds that a rank has to end after its script's exception, or after a signal to all ranks.

``torchrun`` gives a rank as long.
"""


SILENT_SECONDS = 5.0
"""Seconds after which a process that has closed its pipe without a last event counts as alive.

A process that is ending may close its descriptors before it is gone.
"""


@dataclass(frozen=True, slots=True)
class Silent:
    """A process is alive but has closed the pipe through which it sends events."""


class _LocalRank:
    """A process of the run on this host, in this process group; it is started here.

    Of replicas of a single-process script, only rank 0 writes to the terminal.
    """

    def __init__(self, task: RankTask) -> None:
        spec = task.spec
        self.rank = spec.rank
        self._events, theirs = Pipe(duplex=False)
        their_control, self._control = Pipe(duplex=False)
        silent = subprocess.DEVNULL if spec.meeting is not None and spec.rank > 0 else None
        with theirs, their_control:
            fds = (theirs.fileno(), their_control.fileno())
            self._process = subprocess.Popen(
                python(HARNESS),
                cwd=spec.request.script.cwd,
                env={**task.environment, EVENTS_FD: str(fds[0]), CONTROL_FD: str(fds[1])},
                pass_fds=fds,
                stdout=silent,
                stderr=silent,
            )
        self._pidfd = os.pidfd_open(self._process.pid)
        with contextlib.suppress(BrokenPipeError):  # it has ended; its exit code tells more
            self._control.send(spec)

    @property
    def returncode(self) -> int:
        """The exit code, as in ``subprocess``; waits for the end."""
        return self._process.wait()

    def events(self) -> Iterator[Event | Silent]:
        """Yield the events until the process has ended."""
        sources: list[Connection | int] = [self._events, self._pidfd]
        done = False
        timeout = None
        while True:
            ready = wait(sources, timeout)
            if self._events in ready:
                try:
                    event: Event = self._events.recv()
                except (EOFError, ConnectionResetError):
                    sources.remove(self._events)
                    timeout = None if done else SILENT_SECONDS
                    continue
                done |= isinstance(event, Finished | PlanEnded | Raised | Ran)
                yield event
            elif ready:
                return
            else:
                timeout = None
                yield Silent()

    def signal(self, number: int) -> None:
        """Send the process a signal; do nothing if it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process without waiting."""
        self.signal(signal.SIGKILL)

    def end(self) -> None:
        """Wait for the end, and close what this object holds."""
        self._process.wait()
        os.close(self._pidfd)
        self._control.close()
        self._events.close()


@dataclass(slots=True)
class Foreground:
    """A script that runs in this process group, as one process or several."""

    _ranks: Sequence[_LocalRank | Rank]
    replicas: bool = False
    """The ranks are copies of a single-process script: the end of rank 0 is that of the run."""
    signals: list[int] = field(default_factory=list)
    """Signals that this process received and the script got too."""
    first: int | None = None
    """The rank that failed first; ``None`` while none has."""
    _running: list[_LocalRank | Rank] = field(default_factory=list)
    _deadlines: dict[int, float] = field(default_factory=dict)
    """When ranks are killed if they still run, in seconds of the monotonic clock."""
    _killed: set[int] = field(default_factory=set)
    """Ranks that were killed at their deadline."""
    _followers: list[_LocalRank | Rank] = field(default_factory=list)
    """Ranks that only reported another rank's end."""
    _report_seconds: float = 0.0
    """Another rank may notice a failure first. The failed rank then has these seconds to report."""
    _report_deadline: float = inf
    """When that time is over, by the same clock; infinite while no rank has noticed a failure."""

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self._ranks)

    @property
    def code(self) -> int:
        """Exit code of the rank that failed first, as in ``subprocess``; waits for all ranks.

        0 if no rank failed; 1 if that rank was killed at its deadline.
        """
        codes = [rank.returncode for rank in self._ranks]
        if self.first is None:
            return 0
        return 1 if self.first in self._killed else codes[self.first] or 0

    def events(self) -> Iterator[tuple[int, Event | Silent]]:
        """Yield the events of all ranks, each with the rank, until all have ended."""
        received: SimpleQueue[tuple[_LocalRank | Rank, Event | Silent | Ended]] = SimpleQueue()
        self._running = list(self._ranks)
        for rank in self._ranks:
            listen(rank, rank.events(), received)
        while self._running:
            try:
                rank, event = received.get(timeout=self._timeout())
            except Empty:
                pass
            else:
                if isinstance(event, Ended):
                    self._has_ended(rank, event)
                else:
                    yield rank.rank, event
                    self._judge(rank, event)
            if self._followers and not (self._running and time.monotonic() < self._report_deadline):
                self._fails(self._followers[0])  # no rank reported an error of its own
            self._kill_late()

    def pass_on(self, number: int) -> None:
        """Send a signal that this process received to every rank."""
        self.signals.append(number)
        for rank in self._ranks:
            rank.signal(number)

    def interrupted(self) -> None:
        """Record that Ctrl-C was pressed; the terminal has told only the ranks of this host."""
        self.signals.append(signal.SIGINT)
        for rank in self._ranks:
            if not isinstance(rank, _LocalRank):
                rank.signal(signal.SIGINT)

    def _judge(self, rank: _LocalRank | Rank, event: Event | Silent) -> None:
        """End the other ranks if ``event`` of ``rank`` reports a failure."""
        match event:
            case Raised(follows=True) if len(self._ranks) > 1:
                self._followers.append(rank)
                if self.first is None:
                    until = time.monotonic() + self._report_seconds
                    self._report_deadline = min(self._report_deadline, until)
            case Raised():
                self._fails(rank)
            case PlanEnded(report=report) if report.verdict is Verdict.REFUSED:
                self._fails(rank)

    def _has_ended(self, rank: _LocalRank | Rank, event: Ended) -> None:
        """End the other ranks if they would wait for ``rank``, which has ended."""
        if event.error is not None:
            raise event.error
        self._running.remove(rank)
        self._deadlines.pop(rank.rank, None)
        if rank in self._followers:
            return
        if rank.returncode != 0:
            self._fails(rank)
        if self.replicas and rank.rank == 0:
            self._end_others()

    def _fails(self, rank: _LocalRank | Rank) -> None:
        """Record that ``rank`` fails; if it is the first, end the others.

        After a signal to all ranks, the others are ending already and may still save a checkpoint.
        They get no SIGTERM then.
        """
        if self.first is not None or (self.replicas and rank.rank > 0 and self._has_ended_run()):
            return
        self.first, self._report_deadline = rank.rank, inf
        if len(self._ranks) == 1:
            return
        now = time.monotonic()
        for each in self._running:
            ending = self.signals or each is rank
            self._deadlines[each.rank] = now + (EXIT_SECONDS if ending else GRACE)
            if not ending:
                each.signal(signal.SIGTERM)

    def _end_others(self) -> None:
        """Kill the other replicas unless they end by themselves soon: rank 0 has ended."""
        for each in self._running:
            self._deadlines.setdefault(each.rank, time.monotonic() + GRACE)

    def _timeout(self) -> float | None:
        """Return the seconds until the first deadline; ``None`` if there is none."""
        soonest = min([self._report_deadline, *self._deadlines.values()])
        return None if soonest == inf else max(0.0, soonest - time.monotonic())

    def _kill_late(self) -> None:
        for rank in self._running:
            if self._deadlines.get(rank.rank, inf) <= time.monotonic():
                rank.kill()
                del self._deadlines[rank.rank]
                self._killed.add(rank.rank)

    def _has_ended_run(self) -> bool:
        """Return whether the process of rank 0 has ended for a reason of its own."""
        return all(rank.rank > 0 for rank in (*self._running, *self._followers))


@contextmanager
def started(tasks: Sequence[RankTask]) -> Iterator[Foreground]:
    """Start a process for each task; all have ended when the context is left.

    Those of this host are in this process group, so the terminal sends Ctrl-C to them directly.
    """
    with ExitStack() as stack:
        ranks: list[_LocalRank | Rank] = []
        replicas = tasks[0].spec.meeting is not None
        running = Foreground(ranks, replicas=replicas, _report_seconds=report_seconds(tasks))
        stack.enter_context(_passing_signals(running))
        try:
            for task in tasks:
                host, spec = task.host, task.spec
                ranks.append(host.start(spec, task.environment) if host else _LocalRank(task))
                stack.callback(ranks[-1].end)
        except (OSError, WorkerError):  # the ranks that have started would wait for this one
            for rank in ranks:
                rank.kill()
            raise
        yield running


@contextmanager
def _passing_signals(running: Foreground) -> Iterator[None]:
    """Pass signals on to the script; of Ctrl-C, the ranks of this host know already."""

    def forward(number: int, frame: FrameType | None) -> None:
        running.pass_on(number)

    def interrupted(number: int, frame: FrameType | None) -> None:
        running.interrupted()

    handlers: dict[int, Callable[[int, FrameType | None], None]] = {
        signal.SIGINT: interrupted,
        signal.SIGTERM: forward,
        signal.SIGHUP: forward,
    }
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if signal.getsignal(number) is not signal.SIG_IGN  # under nohup, the script ignores it too
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
