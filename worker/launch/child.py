"""Starts one child process, exchanges messages with it and ends it. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import inf
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Self

from autofit.exceptions import WorkerError
from autofit.worker.launch import other_uid
from autofit.worker.launch.reaper import ProcessEntry, kill_until_gone, processes, with_descendants
from autofit.worker.records.trials import (
    MOST_PRINTED,
    Agreed,
    Answer,
    ChildSpec,
    Event,
    LaunchRequest,
    Printed,
)

EVENTS_FD = "AUTOFIT_EVENTS_FD"
"""Environment variable with the child's descriptor of the event pipe.

The child sends pickled events through it to its parent.
"""
CONTROL_FD = "AUTOFIT_CONTROL_FD"
"""Environment variable with the child's descriptor of the control pipe.

The parent sends one ``ChildSpec``, then an ``Answer`` to each ``Asking`` and an ``Agreed`` once all
ranks have sent ``Agreeing``. To a prepared child it also sends the ``LaunchRequest`` for which the
child is used. When the pipe breaks, the child ends.
"""

Message = Agreed | Answer | LaunchRequest
"""What a parent sends a child after the ``ChildSpec``."""
EXIT_SECONDS = 3.0
"""Seconds a child has to flush its output and exit after its last event."""
_KILL_SECONDS = 10.0
"""Seconds to wait for killed processes to disappear. Only a driver call can delay one longer."""
TOLD_WITHIN = 1.0
"""Seconds within which the output of rank 0 is told."""


class Tail:
    """Keeps the last lines of a stream, as a terminal would show them, in bounded memory."""

    def __init__(self, lines: int = 200, width: int = 8192) -> None:
        self._lines: deque[bytes] = deque(maxlen=lines)
        self._partial = b""
        self._width = width

    def feed(self, data: bytes) -> None:
        """Add the next bytes of the stream."""
        *whole, self._partial = (self._partial + data).split(b"\n")
        self._lines += [line[-self._width :] for line in whole[-(self._lines.maxlen or 0) :]]
        self._partial = self._partial[-self._width :]

    def __str__(self) -> str:
        lines = [*self._lines, self._partial] if self._partial else self._lines
        # A progress bar rewrites its line after each carriage return: only the last state counts.
        last = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines)
        return "\n".join(line.decode(errors="replace") for line in last)


@dataclass(slots=True)
class Held:
    """What a parent holds of a process: descriptors, and how to learn its exit code."""

    pid: int
    pidfd: int
    events: Connection
    control: Connection
    output: FileIO
    """What the process prints; reading does not block."""
    wait: Callable[[], int]
    """Waits for the end and returns the exit code, or minus the signal that ended the process."""

    @property
    def descriptors(self) -> list[int]:
        """The descriptors, in the order in which ``of`` takes them."""
        return [self.pidfd, self.events.fileno(), self.control.fileno(), self.output.fileno()]

    @classmethod
    def of(cls, pid: int, descriptors: Sequence[int], wait: Callable[[], int]) -> Self:
        """Return what ``descriptors`` hold of the process ``pid``."""
        pidfd, events, control, output = descriptors
        os.set_blocking(output, False)
        return cls(
            pid=pid,
            pidfd=pidfd,
            events=Connection(events, writable=False),
            control=Connection(control, readable=False),
            output=FileIO(output),
            wait=wait,
        )

    @property
    def running(self) -> bool:
        """Whether the process runs; ``False`` once this object is closed."""
        return self.pidfd >= 0 and not wait([self.pidfd], timeout=0)

    def close(self) -> None:
        """Close the descriptors. A second call does nothing."""
        for pipe in (self.events, self.control, self.output):
            pipe.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def start(
    command: list[str], spec: ChildSpec, environment: Mapping[str, str], uid: int | None = None
) -> Held:
    """Start ``command`` in a session of its own, with one pipe in each direction.

    Raises ``WorkerError`` when the operating system cannot start the process.
    """
    events, child_events = os.pipe()
    child_control, control = os.pipe()
    output, child_output = os.pipe()
    numbers = {EVENTS_FD: str(child_events), CONTROL_FD: str(child_control)}
    try:
        with _no_signal_blocked():
            process = subprocess.Popen(
                command,
                cwd=spec.request.script.cwd,
                env={**environment, **numbers},
                stdin=subprocess.DEVNULL,
                stdout=child_output,
                stderr=child_output,
                start_new_session=True,
                pass_fds=(child_events, child_control),
                **other_uid.process_options(uid),
            )
    except OSError as error:
        for fd in (events, control, output):
            os.close(fd)
        where = spec.request.script.cwd
        raise WorkerError(f"cannot start {command[0]} in {where}: {error.strerror}") from error
    finally:
        for fd in (child_events, child_control, child_output):
            os.close(fd)
    held = [os.pidfd_open(process.pid), events, control, output]
    return Held.of(process.pid, held, process.wait)


class Child:
    """A process in a session of its own, with one pipe in each direction.

    Use it as a context manager: on exit, the process and all its descendants are killed. With
    ``lone``, this process runs only such children, one at a time, and is a subreaper
    (``adopt_orphans``). Every orphan it adopts then belongs to the child. With ``uid``, the child
    runs under it: see ``other_uid``.
    """

    def __init__(
        self, held: Held, spec: ChildSpec, *, lone: bool = False, uid: int | None = None
    ) -> None:
        self.held = held
        self.spec = spec
        self._uid = uid
        self.tail = Tail()
        self._lone = lone
        self._lock = threading.Lock()
        self._killed = False
        self._seen: set[ProcessEntry] = set()
        self.pid = held.pid
        self.rank = spec.rank

    @classmethod
    def start(
        cls,
        command: list[str],
        spec: ChildSpec,
        environment: Mapping[str, str],
        *,
        lone: bool = False,
        uid: int | None = None,
    ) -> Self:
        """Start ``command`` with two pipes in the script's working directory, and send ``spec``.

        Raises ``WorkerError`` when the operating system cannot start the process.
        """
        held = start(command, spec, environment, uid)
        with contextlib.suppress(BrokenPipeError):  # it ended at once; its exit code tells more
            held.control.send(spec)
        return cls(held, spec, lone=lone, uid=uid)

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the processes that this object started."""
        return (self.pid,)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def answer(self, answer: Message) -> None:
        """Send the child the answer that it is waiting for."""
        with contextlib.suppress(OSError):  # the child has ended; its exit code tells more
            self.held.control.send(answer)

    def events(self) -> Iterator[Event]:
        """Yield the child's events until it has ended."""
        sources: list[Connection | int] = [
            self.held.events,
            self.held.output.fileno(),
            self.held.pidfd,
        ]
        due = inf  # when there is output to tell
        while self.held.pidfd in sources:
            timeout = None if due == inf else max(0.0, due - time.monotonic())
            for source in wait(sources, timeout):
                if source is self.held.events:
                    event = self._receive()
                    if event is None:
                        sources.remove(self.held.events)
                    else:
                        yield event
                elif source == self.held.pidfd:
                    sources.remove(self.held.pidfd)
                elif not self._read_output():
                    sources.remove(self.held.output.fileno())
                elif self.rank == 0:
                    due = min(due, time.monotonic() + TOLD_WITHIN)
            if due <= time.monotonic():
                due = inf
                yield Printed(text=str(self.tail)[-MOST_PRINTED:])
        self._end_tree()  # descendants may hold the pipes open, and reading would not end
        while self.held.events in sources and self.held.events.poll():
            event = self._receive()
            if event is None:
                break
            yield event
        while self._read_output():
            pass

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the signal that ended it; ``None`` if this object killed it."""
        code = self.held.wait()
        return None if self._killed and code == -signal.SIGKILL else code

    def signal(self, number: int) -> None:
        """Send the child a signal; do nothing if it has ended."""
        with self._lock:
            if self.held.running:
                signal.pidfd_send_signal(self.held.pidfd, number)

    def kill(self) -> bool:
        """Kill the child's process group without waiting; return ``False`` if it had ended."""
        with self._lock:
            if not self.held.running:  # another process may have its id by now
                return False
            self._killed = True
            self._seen |= self._mine(processes())  # killing the child makes its children orphans
            os.killpg(self.pid, signal.SIGKILL)
            return True

    def end(self) -> None:
        """Kill the child and its descendants, wait until they are gone, close the pipes."""
        self._end_tree()
        self.held.wait()
        with self._lock:
            self.held.close()

    def _end_tree(self) -> None:
        self.kill()
        kill_until_gone(lambda table: self._mine(table) | self._seen, _KILL_SECONDS)
        if self._lone:
            bury_orphans(self.pid)

    def _mine(self, table: dict[int, ProcessEntry]) -> set[ProcessEntry]:
        """Return the child, its session, its process group, adopted orphans and descendants."""
        roots = {
            process.pid
            for process in table.values()
            if self.pid in (process.pid, process.session, process.group)
            or (self._lone and process.parent == os.getpid())
        }
        return with_descendants(roots, table)

    def _receive(self) -> Event | None:
        try:
            if self._uid is None:
                event: Event = self.held.events.recv()
            else:
                event = other_uid.loads(self.held.events.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None
        except pickle.UnpicklingError as error:
            raise WorkerError(
                f"a message of the script's process cannot be read: {error}"
            ) from error
        return event

    def _read_output(self) -> bool:
        """Read the output that is there; return ``False`` at its end."""
        data = self.held.output.read(1 << 16)
        self.tail.feed(data or b"")
        return bool(data)


def python(program: Path) -> list[str]:
    """Return the command that runs ``program`` in a new process of this interpreter."""
    return [sys.executable, str(program)]


def adopt_orphans() -> None:
    """Become the parent of every orphan among this process's descendants (Linux only).

    See ``PR_SET_CHILD_SUBREAPER`` in prctl(2). Without it, the init process adopts a daemon that a
    script leaves behind, and autofit can no longer find the daemon.
    """
    pr_set_child_subreaper = 36
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


@contextlib.contextmanager
def _no_signal_blocked() -> Iterator[None]:
    """Start processes with an empty signal mask inside this context: Ray's workers block SIGINT."""
    before = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def bury_orphans(child: int = 0) -> None:
    """Reap adopted processes that have ended, until the next one to reap is ``child``."""
    while True:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None or dead.si_pid == child:
            return
        os.waitpid(dead.si_pid, 0)
