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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from multiprocessing.connection import Connection, Pipe, wait
from types import FrameType

from autofit.worker.launch.child import CONTROL_FD, EVENTS_FD, command_of, python
from autofit.worker.launch.group import report_seconds
from autofit.worker.launch.launcher import HARNESS
from autofit.worker.records.trials import (
    ChildSpec,
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


@dataclass(slots=True, eq=False)
class _Rank:
    """One process of the run."""

    number: int
    process: subprocess.Popen[bytes]
    pidfd: int
    events: Connection | None
    """``None`` once the process has closed its end."""
    silent: float = inf
    """When it counts as ``Silent``, in seconds of the monotonic clock."""
    done: bool = False
    """Whether it has sent its last event."""


@dataclass(slots=True)
class Foreground:
    """A script that runs in this process group, as one process or several."""

    _ranks: Sequence[_Rank]
    replicas: bool = False
    """The ranks are copies of a single-process script: the end of rank 0 is that of the run."""
    signals: list[int] = field(default_factory=list)
    """Signals that this process received and the script got too."""
    first: int | None = None
    """The rank that failed first; ``None`` while none has."""
    _running: list[_Rank] = field(default_factory=list)
    _deadlines: dict[int, float] = field(default_factory=dict)
    """When ranks are killed if they still run, in seconds of the monotonic clock."""
    _killed: set[int] = field(default_factory=set)
    """Ranks that were killed at their deadline."""
    _followers: list[_Rank] = field(default_factory=list)
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
        codes = [rank.process.wait() for rank in self._ranks]
        if self.first is None:
            return 0
        return 1 if self.first in self._killed else codes[self.first]

    def events(self) -> Iterator[tuple[int, Event | Silent]]:
        """Yield the events of all ranks, each with the rank, until all have ended."""
        self._running = list(self._ranks)
        while self._running:
            ready = wait(list(_sources(self._running)), self._timeout())
            for source in sorted(ready, key=lambda each: isinstance(each, int)):  # ends come last
                rank = next((r for r in self._running if source in (r.events, r.pidfd)), None)
                if rank is None:
                    continue
                yield from self._receive(rank) if source is rank.events else self._ended(rank)
            for rank in self._running:
                if rank.silent <= time.monotonic():
                    rank.silent = inf
                    yield rank.number, Silent()
            if self._followers and not (self._running and time.monotonic() < self._report_deadline):
                self._fails(self._followers[0])  # no rank reported an error of its own
            self._kill_late()

    def pass_on(self, number: int) -> None:
        """Send a signal that this process received to every rank."""
        self.signals.append(number)
        for rank in self._ranks:
            rank.process.send_signal(number)  # does nothing if the rank has ended

    def _receive(self, rank: _Rank) -> Iterator[tuple[int, Event]]:
        """Yield the next event of ``rank``; if it reports a failure, end the other ranks."""
        assert rank.events is not None
        try:
            event: Event = rank.events.recv()
        except (EOFError, ConnectionResetError):
            rank.events = None
            rank.silent = inf if rank.done else time.monotonic() + SILENT_SECONDS
            return
        rank.done |= isinstance(event, Finished | PlanEnded | Raised | Ran)
        yield rank.number, event
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

    def _ended(self, rank: _Rank) -> Iterator[tuple[int, Event]]:
        """Yield the last events of a rank that has ended; end the others if they would wait."""
        while rank.events is not None and rank.events.poll():
            yield from self._receive(rank)
        self._running.remove(rank)
        self._deadlines.pop(rank.number, None)
        failed = rank.process.wait() != 0
        if rank in self._followers:
            return
        if failed:
            self._fails(rank)
        if self.replicas and rank.number == 0:
            self._end_others()

    def _fails(self, rank: _Rank) -> None:
        """Record that ``rank`` fails; if it is the first, end the others.

        After a signal to all ranks, the others are ending already and may still save a checkpoint.
        They get no SIGTERM then.
        """
        if self.first is not None or (self.replicas and rank.number > 0 and self._has_ended_run()):
            return
        self.first, self._report_deadline = rank.number, inf
        if len(self._ranks) == 1:
            return
        now = time.monotonic()
        for each in self._running:
            ending = self.signals or each is rank
            self._deadlines[each.number] = now + (EXIT_SECONDS if ending else GRACE)
            if not ending:
                each.process.send_signal(signal.SIGTERM)

    def _end_others(self) -> None:
        """Kill the other replicas unless they end by themselves soon: rank 0 has ended."""
        for each in self._running:
            self._deadlines.setdefault(each.number, time.monotonic() + GRACE)

    def _timeout(self) -> float | None:
        """Return the seconds until the first deadline; ``None`` if there is none."""
        silent = (rank.silent for rank in self._running)
        soonest = min([self._report_deadline, *self._deadlines.values(), *silent])
        return None if soonest == inf else max(0.0, soonest - time.monotonic())

    def _kill_late(self) -> None:
        for rank in self._running:
            if self._deadlines.get(rank.number, inf) <= time.monotonic():
                rank.process.send_signal(signal.SIGKILL)
                del self._deadlines[rank.number]
                self._killed.add(rank.number)

    def _has_ended_run(self) -> bool:
        """Return whether the process of rank 0 has ended for a reason of its own."""
        return all(rank.number > 0 for rank in (*self._running, *self._followers))


@contextmanager
def started(
    specs: Sequence[ChildSpec], environments: Sequence[Mapping[str, str]]
) -> Iterator[Foreground]:
    """Start a child for each task and environment; all have ended when the context is left.

    The children are in this process group, so the terminal sends Ctrl-C to them directly. Of
    replicas of a single-process script, only rank 0 writes to the terminal.
    """
    with ExitStack() as stack:
        ranks: list[_Rank] = []
        replicas = specs[0].meeting is not None
        running = Foreground(ranks, replicas=replicas, _report_seconds=report_seconds(specs))
        stack.enter_context(_passing_signals(running))
        try:
            for number, (spec, environment) in enumerate(zip(specs, environments, strict=True)):
                ranks.append(_start(number, spec, environment, stack))
        except OSError:  # the ranks that have started would wait for this one
            running.pass_on(signal.SIGKILL)
            raise
        yield running


def _start(number: int, spec: ChildSpec, environment: Mapping[str, str], stack: ExitStack) -> _Rank:
    """Start one rank; ``stack`` waits for it and closes its descriptors."""
    events, theirs = Pipe(duplex=False)
    their_control, control = Pipe(duplex=False)
    fds = (theirs.fileno(), their_control.fileno())
    silent = subprocess.DEVNULL if spec.meeting is not None and number > 0 else None
    process = subprocess.Popen(
        command_of(spec, python(HARNESS)),
        cwd=spec.request.script.cwd,
        env={**environment, EVENTS_FD: str(fds[0]), CONTROL_FD: str(fds[1])},
        pass_fds=fds,
        stdout=silent,
        stderr=silent,
    )
    pidfd = os.pidfd_open(process.pid)
    theirs.close()
    their_control.close()
    stack.enter_context(events)
    stack.enter_context(control)
    stack.callback(os.close, pidfd)
    stack.callback(process.wait)
    with contextlib.suppress(BrokenPipeError):  # it has ended; its exit code tells more
        control.send(replace(spec, rank=number))
    return _Rank(number, process, pidfd, events)


def _sources(ranks: Sequence[_Rank]) -> Iterator[Connection | int]:
    """Yield all pipes of events, then all process descriptors."""
    for rank in ranks:
        if rank.events is not None:
            yield rank.events
    for rank in ranks:
        yield rank.pidfd


@contextmanager
def _passing_signals(running: Foreground) -> Iterator[None]:
    """Pass SIGTERM and SIGHUP on to the script; only record Ctrl-C, which the script gets too."""

    def forward(number: int, frame: FrameType | None) -> None:
        running.pass_on(number)

    def noted(number: int, frame: FrameType | None) -> None:
        running.signals.append(number)

    handlers: dict[int, Callable[[int, FrameType | None], None]] = {
        signal.SIGINT: noted,
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
