"""Starts the script in the foreground, as the user's own command would be: ``autofit run``."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from types import FrameType

from autofit.worker.child import CONTROL_FD, EVENTS_FD, python
from autofit.worker.launcher import HARNESS
from autofit.worker.records import ChildSpec, Event


@dataclass(slots=True)
class Foreground:
    """A script that runs in this process group."""

    process: subprocess.Popen[bytes]
    _events: Connection
    signals: list[int] = field(default_factory=list)
    """Signals from outside that were passed on to it."""

    def events(self) -> Iterator[Event]:
        """Yield what the harness tells, until the script's process closes its end."""
        while True:
            try:
                yield self._events.recv()
            except (EOFError, ConnectionResetError):
                return


@contextmanager
def started(spec: ChildSpec, environment: Mapping[str, str]) -> Iterator[Foreground]:
    """Start the child in this process group, so that the terminal's Ctrl-C is its own affair."""
    events, theirs = Pipe(duplex=False)
    their_control, control = Pipe(duplex=False)
    fds = (theirs.fileno(), their_control.fileno())
    variables = {EVENTS_FD: str(fds[0]), CONTROL_FD: str(fds[1])}
    process = subprocess.Popen(
        python(HARNESS),
        cwd=spec.request.script.cwd,
        env={**environment, **variables},
        pass_fds=fds,
    )
    theirs.close()
    their_control.close()
    running = Foreground(process, events)
    with events, control, _passing_signals(running):
        control.send(spec)
        try:
            yield running
        finally:
            process.wait()


@contextmanager
def _passing_signals(running: Foreground) -> Iterator[None]:
    """Wait for the script through Ctrl-C, which it gets itself; pass SIGTERM and SIGHUP on."""

    def forward(number: int, frame: FrameType | None) -> None:
        running.signals.append(number)
        running.process.send_signal(number)

    def noted(number: int, frame: FrameType | None) -> None:
        running.signals.append(number)

    handlers: dict[int, Callable[[int, FrameType | None], None]] = {
        signal.SIGINT: noted,
        signal.SIGTERM: forward,
        signal.SIGHUP: forward,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
