"""Starts a search's first process before Ray runs, and hands it to Ray's actor. Imports no torch.

The process is prepared (``LaunchRequest.prepared``): it imports the script while Ray starts, and
waits before its first device call. The actor connects to a Unix socket of packets, and receives one
with the process's descriptors (``SCM_RIGHTS``, unix(7)). Only the process that started another can
wait for it, so the starter sends the exit code in a second packet.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from autofit.worker.launch.child import Child, Held
from autofit.worker.launch.group import Group
from autofit.worker.launch.guard import Guard
from autofit.worker.launch.launcher import Control, Started, launch
from autofit.worker.records.trials import ChildSpec, LaunchEvent, LaunchRequest

_LONGEST = 1 << 20
"""Bytes of the longest packet."""
_DESCRIPTORS = 4


class First:
    """A prepared process, which one other process of this user may take over.

    ``folder``: private to this user; the socket lies there.
    """

    def __init__(self, request: LaunchRequest, started: Started, folder: Path) -> None:
        (child,) = started.group.ranks
        assert isinstance(child, Child), "ranks of other hosts are not handed over"
        self.request = request
        self.address = str(folder / "first")
        self._started = started
        self._child = child
        self._given = False
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(self.address)
        self._socket.listen(1)
        self._giving = threading.Thread(target=self._give, name="first process", daemon=True)
        self._giving.start()

    @property
    def ended(self) -> bool:
        """Whether the process ended before another took it over."""
        return not self._given and not self._child.held.running

    def events(self, request: LaunchRequest, guard: Guard) -> Iterator[LaunchEvent]:
        """Use the process, which has ended, for ``request`` here; yield its events and reports."""
        control = Control()
        control.use(request, guard)
        return launch(self.request, control=control, guard=guard, started=self._started)

    def close(self) -> None:
        """Kill the process and wait until it is gone; its new owner removes its files."""
        with self._lock:
            self._socket.shutdown(socket.SHUT_RDWR)
            given = self._given
        if given:
            self._child.kill()
        else:
            self._started.end()
        self._giving.join()
        self._socket.close()

    def _give(self) -> None:
        try:
            other, _ = self._socket.accept()
        except OSError:  # closed
            return
        with other, contextlib.suppress(OSError):  # this was closed, or the other process has ended
            with self._lock:
                about = self._child.pid, self._child.spec, self._started.folder, self._started.since
                held = self._child.held
                socket.send_fds(other, [pickle.dumps(about)], held.descriptors)
                self._given = True
            code = held.wait()
            held.close()
            other.send(str(code).encode())


def take(address: str) -> Started:
    """Take over the process that ``First`` offers at ``address``.

    Raises ``OSError`` if it is no longer offered.
    """
    other = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.connect(address)
    packet, descriptors, _, _ = socket.recv_fds(other, _LONGEST, _DESCRIPTORS)
    about: tuple[int, ChildSpec, Path, float] = pickle.loads(packet)
    pid, spec, folder, since = about
    held = Held.of(pid, descriptors, functools.cache(lambda: _exit_code(other)))
    return Started(Group([Child(held, spec)]), folder, since)


def _exit_code(other: socket.socket) -> int:
    """Return the exit code that the starter sends; SIGKILL's if the starter has ended."""
    packet = other.recv(_LONGEST)
    return int(packet) if packet else -signal.SIGKILL
