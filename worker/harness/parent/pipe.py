"""Typed events to the parent, over the pipe the launcher opened, and its answers."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from multiprocessing.connection import Connection

from autofit.worker.launch import lifeline
from autofit.worker.launch.child import CONTROL_FD, EVENTS_FD
from autofit.worker.launch.reaper import SESSION
from autofit.worker.records.trials import Agreed, Agreeing, Answer, Asking, ChildSpec, Event

CLOSED = (
    "autofit: the script has closed every file descriptor, and so the one that it is measured"
    " through: let it close less, as with os.closerange(3, 256)\n"
)


class Reporter:
    """Sends events; nothing that is wrong with the pipe reaches the script.

    A broken one means that the parent is gone, which the lifeline answers. Where the script has
    closed it, a real run goes on unheard. A trial ends: nobody would learn what it measures.

    ``rank``: which of several processes this is; the first one asks for all.
    """

    def __init__(self, connection: Connection, rank: int = 0, *, trial: bool = True) -> None:
        self.rank = rank
        self._trial = trial
        self._pipe = lifeline.file_of(connection.fileno())
        self._connection = connection
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._agreed: queue.SimpleQueue[Agreed] = queue.SimpleQueue()

    def send(self, event: Event) -> None:
        """Send one event; nothing from a forked child of the script."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            # Its number may be another file's by now: nothing may be written into that.
            ours = lifeline.file_of(self._connection.fileno()) == self._pipe
            with contextlib.suppress(OSError):
                if ours:
                    self._connection.send(event)
        if self._trial and not ours:
            os.write(2, CLOSED.encode())
            os._exit(1)

    def ask(self, *, fresh: bool) -> Answer:
        """Ask for another plan, and wait for the answer."""
        if os.getpid() != self._pid:  # nobody would answer a forked child
            return Answer(plan=None, timeout=0.0)
        if self.rank == 0:
            self.send(Asking(fresh=fresh))
        return self._answers.get()

    def agree(self, said: Agreeing, patience: float | None = None) -> tuple[Agreeing, ...]:
        """Wait until every rank has said something, and return it, by rank.

        Nothing is returned after ``patience`` seconds without the others.
        """
        if os.getpid() != self._pid:
            return (said,)
        self.send(said)
        try:
            return self._agreed.get(timeout=patience).said
        except queue.Empty:
            return ()

    def answered(self, answer: Answer | Agreed) -> None:
        """Take the parent's answer, which another thread has received."""
        if isinstance(answer, Agreed):
            self._agreed.put(answer)
        else:
            self._answers.put(answer)


def connect() -> tuple[ChildSpec, Reporter, int]:
    """Return what to do, the way to report, and the descriptor whose end means ours."""
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
