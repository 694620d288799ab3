"""Sends typed events to the parent over the pipe that the launcher opened; receives its answers."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection

from autofit.worker.launch import lifeline
from autofit.worker.launch.child import CONTROL_FD, EVENTS_FD
from autofit.worker.launch.reaper import SESSION
from autofit.worker.records.phases import IDLE, Phases, process_start
from autofit.worker.records.trials import (
    Agreed,
    Agreeing,
    Answer,
    Asking,
    ChildSpec,
    Entered,
    Event,
    Finished,
    LaunchRequest,
    Paused,
    PlanEnded,
    PlanStarted,
    Raised,
)

CLOSED = (
    "autofit: the script has closed every file descriptor, also the one that reports to autofit;"
    " close fewer, for example with os.closerange(3, 256)\n"
)


class Reporter:
    """Sends events; problems of the pipe never reach the script.

    A broken pipe means that the parent has ended, which the lifeline detects. If the script has
    closed the pipe, a real run continues without reports. A trial ends, because its measurements
    would be lost.

    ``rank``: the rank of this process; rank 0 asks the parent for all ranks.
    """

    def __init__(self, connection: Connection, rank: int = 0, *, trial: bool = True) -> None:
        self.rank = rank
        tells = trial and rank == 0
        self.phases = Phases(process_start(), tell=self._entered if tells else lambda phase: None)
        """Where the time of this process goes."""
        self._trial = trial
        self._pipe = lifeline.file_of(connection.fileno())
        self._connection = connection
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._agreed: queue.SimpleQueue[Agreed] = queue.SimpleQueue()
        self._used_for: queue.SimpleQueue[tuple[LaunchRequest, float]] = queue.SimpleQueue()

    def send(self, event: Event) -> None:
        """Send one event, with seconds by phase; a forked child of the script sends nothing."""
        if os.getpid() != self._pid:
            return
        event = self._timed(event)
        with self._lock:
            # The descriptor may belong to another file by now; never write into that one.
            ours = lifeline.file_of(self._connection.fileno()) == self._pipe
            with contextlib.suppress(OSError):
                if ours:
                    self._connection.send(event)
        if self._trial and not ours:
            os.write(2, CLOSED.encode())
            os._exit(1)

    def _entered(self, phase: str) -> None:
        self.send(Entered(phase=phase))

    def _timed(self, event: Event) -> Event:
        """Return ``event`` with its ``seconds_by_phase``, if it has any."""
        match event:
            case PlanEnded():
                report = replace(event.report, seconds_by_phase=self.phases.take())
                return PlanEnded(report=report)
            case PlanStarted() | Raised() | Finished():
                return replace(event, seconds_by_phase=tuple(self.phases.seconds().items()))
        return event

    def ask(self, *, fresh: bool) -> Answer:
        """Ask for more plans, and wait for the answer."""
        if os.getpid() != self._pid:  # the parent does not answer a forked child
            return Answer(plans=(), timeout=0.0)
        if self.rank == 0:
            self.send(Asking(fresh=fresh))
        with self.phases.within(IDLE):
            return self._answers.get()

    def pause(self, *, clean: bool) -> LaunchRequest:
        """Wait until a launch uses this prepared process; return its request.

        ``clean``: whether the process holds no device memory. A process that holds some ends here,
        because the launch beside it needs that memory. A fork of the script ends here too.
        """
        if os.getpid() != self._pid or not clean:
            os.killpg(os.getpgid(0), signal.SIGKILL)
        self.send(Paused())
        request, since = self._used_for.get()
        self.phases.restart(since)  # the time before belongs to Ray, or to the launch beside
        return request

    def agree(self, said: Agreeing, patience: float | None = None) -> tuple[Agreeing, ...]:
        """Wait until every rank has sent a value; return the values in the order of the ranks.

        Returns an empty tuple after ``patience`` seconds.
        """
        if os.getpid() != self._pid:
            return (said,)
        self.send(said)
        try:
            return self._agreed.get(timeout=patience).said
        except queue.Empty:
            return ()

    def answered(self, answer: Answer | Agreed | LaunchRequest) -> None:
        """Receive the parent's answer from the thread that reads the pipe."""
        match answer:
            case Agreed():
                self._agreed.put(answer)
            case Answer():
                self._answers.put(answer)
            case LaunchRequest():
                self._used_for.put((answer, time.monotonic()))


def connect() -> tuple[ChildSpec, Reporter, int]:
    """Return the task, the reporter, and the descriptor that closes when the parent ends."""
    os.environ.pop(SESSION, None)
    control_fd = int(os.environ.pop(CONTROL_FD))
    events_fd = int(os.environ.pop(EVENTS_FD))
    lifeline_fd, reporting_fd = map(lifeline.out_of_the_way, (control_fd, events_fd))
    os.close(events_fd)
    with Connection(control_fd, writable=False) as control:
        spec = control.recv()
    assert isinstance(spec, ChildSpec)
    events = Connection(reporting_fd, readable=False)
    return spec, Reporter(events, spec.rank, trial=spec.mode == "trial"), lifeline_fd
