"""Starts the script in the foreground, as the user's own command would be: ``autofit run``.

Once, or as several ranks. What one rank's end means to the others is told here and nowhere else:
they go on while it ended well; once it has failed they are waiting for it, and are ended.
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

from autofit.worker.launch.child import CONTROL_FD, EVENTS_FD, python
from autofit.worker.launch.group import HEARING
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
"""Seconds between SIGTERM and SIGKILL for ranks whose peer has failed."""
LEAVE = 30.0
"""Seconds that a rank of several has from what ends it (an exception of the script's, or a signal
from outside that has ended another rank) to its end; as ``torchrun`` gives them."""


UNHEARD = 5.0
"""Seconds that a process which ended its reports without a last word has until it counts as alive:
while it ends, its descriptors may be closed before it is gone."""


@dataclass(frozen=True, slots=True)
class Unheard:
    """A process lives and has closed the pipe through which it reports."""


@dataclass(slots=True, eq=False)
class _Rank:
    """One process of the run."""

    number: int
    process: subprocess.Popen[bytes]
    pidfd: int
    events: Connection | None
    """``None`` once it is closed at the other end."""
    unheard: float = inf
    """When it counts as ``Unheard``, in seconds of the monotonic clock."""
    done: bool = False
    """It has said its last word."""


@dataclass(slots=True)
class Foreground:
    """A script that runs in this process group, as one process or several."""

    _ranks: Sequence[_Rank]
    signals: list[int] = field(default_factory=list)
    """Signals from outside that were passed on to it."""
    first: int | None = None
    """The rank that failed first; ``None`` while none has."""
    _running: list[_Rank] = field(default_factory=list)
    _deadlines: dict[int, float] = field(default_factory=dict)
    """When ranks are killed if they are still there, in seconds of the monotonic clock."""
    _cut: set[int] = field(default_factory=set)
    """Ranks that were killed so."""
    _mourning: list[_Rank] = field(default_factory=list)
    """Ranks that said no more than that another is gone."""
    _hearing: float = inf
    """Until when the true culprit may still speak, by the same clock."""

    @property
    def code(self) -> int:
        """Exit code once all have ended: of the rank that failed first, as ``subprocess`` has it.

        Zero where none did; one where its last words took too long.
        """
        codes = [rank.process.wait() for rank in self._ranks]
        if self.first is None:
            return 0
        return 1 if self.first in self._cut else codes[self.first]

    def events(self) -> Iterator[tuple[int, Event | Unheard]]:
        """Yield what each rank's harness tells, with its number, until all have ended."""
        self._running = list(self._ranks)
        while self._running:
            ready = wait(list(_sources(self._running)), self._patience())
            for source in sorted(ready, key=lambda each: isinstance(each, int)):  # ends come last
                rank = next((r for r in self._running if source in (r.events, r.pidfd)), None)
                if rank is None:
                    continue
                if source is rank.events:
                    yield from self._heard(rank)
                    continue
                while rank.events is not None and rank.events.poll():
                    yield from self._heard(rank)
                self._running.remove(rank)
                self._deadlines.pop(rank.number, None)
                if rank.process.wait() and rank not in self._mourning:
                    self._fails(rank)
            for rank in self._running:
                if rank.unheard <= time.monotonic():
                    rank.unheard = inf
                    yield rank.number, Unheard()
            if self._mourning and not (self._running and time.monotonic() < self._hearing):
                self._fails(self._mourning[0])  # at its word: nobody has said more
            self._kill_late()

    def pass_on(self, number: int) -> None:
        """Send a signal from outside to every rank."""
        self.signals.append(number)
        for rank in self._ranks:
            rank.process.send_signal(number)  # nothing where it has ended

    def _heard(self, rank: _Rank) -> Iterator[tuple[int, Event]]:
        """Yield the next event of ``rank``, and end the others where it is its last word."""
        assert rank.events is not None
        try:
            event: Event = rank.events.recv()
        except (EOFError, ConnectionResetError):
            rank.events = None
            rank.unheard = inf if rank.done else time.monotonic() + UNHEARD
            return
        rank.done |= isinstance(event, Finished | PlanEnded | Raised | Ran)
        yield rank.number, event
        match event:
            case Raised(follows=True) if len(self._ranks) > 1:
                self._mourning.append(rank)
                if self.first is None:
                    self._hearing = min(self._hearing, time.monotonic() + HEARING)
            case Raised():
                self._fails(rank)
            case PlanEnded(report=report) if report.verdict is Verdict.REFUSED:
                self._fails(rank)

    def _fails(self, rank: _Rank) -> None:
        """Take note that ``rank`` fails; where it is the first, the others are ended.

        After a signal from outside they have been told to end, and may save what they have.
        """
        if self.first is not None:
            return
        self.first, self._hearing = rank.number, inf
        if len(self._ranks) == 1:
            return
        now = time.monotonic()
        for each in self._running:
            patient = self.signals or each is rank
            self._deadlines[each.number] = now + (LEAVE if patient else GRACE)
            if not patient:
                each.process.send_signal(signal.SIGTERM)

    def _patience(self) -> float | None:
        """Return the seconds until the first deadline; ``None`` where there is none."""
        unheard = (rank.unheard for rank in self._running)
        soonest = min([self._hearing, *self._deadlines.values(), *unheard])
        return None if soonest == inf else max(0.0, soonest - time.monotonic())

    def _kill_late(self) -> None:
        for rank in self._running:
            if self._deadlines.get(rank.number, inf) <= time.monotonic():
                rank.process.send_signal(signal.SIGKILL)
                del self._deadlines[rank.number]
                self._cut.add(rank.number)


@contextmanager
def started(spec: ChildSpec, environments: Sequence[Mapping[str, str]]) -> Iterator[Foreground]:
    """Start a child for each environment in this process group.

    So the terminal's Ctrl-C is its own affair. All have ended when the context is left.
    """
    with ExitStack() as stack:
        ranks: list[_Rank] = []
        running = Foreground(ranks)
        stack.enter_context(_passing_signals(running))
        try:
            for number, environment in enumerate(environments):
                ranks.append(_start(number, spec, environment, stack))
        except OSError:  # the others would wait for it
            running.pass_on(signal.SIGKILL)
            raise
        yield running


def _start(number: int, spec: ChildSpec, environment: Mapping[str, str], stack: ExitStack) -> _Rank:
    """Start one rank; ``stack`` closes what belongs to it, once it has ended."""
    events, theirs = Pipe(duplex=False)
    their_control, control = Pipe(duplex=False)
    fds = (theirs.fileno(), their_control.fileno())
    process = subprocess.Popen(
        python(HARNESS),
        cwd=spec.request.script.cwd,
        env={**environment, EVENTS_FD: str(fds[0]), CONTROL_FD: str(fds[1])},
        pass_fds=fds,
    )
    pidfd = os.pidfd_open(process.pid)
    theirs.close()
    their_control.close()
    stack.enter_context(events)
    stack.enter_context(control)
    stack.callback(os.close, pidfd)
    stack.callback(process.wait)
    with contextlib.suppress(BrokenPipeError):  # it has ended already; its exit code says more
        control.send(replace(spec, rank=number))
    return _Rank(number, process, pidfd, events)


def _sources(ranks: Sequence[_Rank]) -> Iterator[Connection | int]:
    """Yield what may have news: events before ends."""
    for rank in ranks:
        if rank.events is not None:
            yield rank.events
    for rank in ranks:
        yield rank.pidfd


@contextmanager
def _passing_signals(running: Foreground) -> Iterator[None]:
    """Wait for the script through Ctrl-C, which it gets itself; pass SIGTERM and SIGHUP on."""

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
        if signal.getsignal(number) is not signal.SIG_IGN  # nor does the script get it: under nohup
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
