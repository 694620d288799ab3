"""Typed events to the parent, over the pipe the launcher opened."""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection

from autofit.worker.child import CONTROL_FD, EVENTS_FD
from autofit.worker.reaper import SESSION
from autofit.worker.records import ChildSpec, Event


class Reporter:
    """Sends events; a broken pipe means the parent is gone, which the lifeline answers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def send(self, event: Event) -> None:
        """Send one event; nothing from a forked child of the script."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._connection.send(event)


def connect() -> tuple[ChildSpec, Reporter, int]:
    """Return what to do, the way to report, and the descriptor whose end means ours."""
    os.environ.pop(SESSION, None)
    control_fd = int(os.environ.pop(CONTROL_FD))
    events_fd = int(os.environ.pop(EVENTS_FD))
    for fd in (control_fd, events_fd):
        os.set_inheritable(fd, False)
    control = Connection(control_fd, writable=False)
    spec = control.recv()
    assert isinstance(spec, ChildSpec)
    lifeline_fd = os.dup(control.fileno())
    control.close()
    return spec, Reporter(Connection(events_fd, readable=False)), lifeline_fd
