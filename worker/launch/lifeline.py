"""The child's side of "nothing outlives its parent". Imports only the standard library.

The parent holds the other end of a pipe open for as long as it wants the child to live. However
the parent goes, the kernel closes that end, and the child ends its whole process group. What the
parent has to say meanwhile comes through the same pipe.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1
_HIGHEST = 1 << 16
"""No descriptor gets a higher number: the kernel's table of them has 8 bytes for each."""
_ROOM = 16
"""Descriptors that fit above the lowest number that ours get."""


def out_of_the_way(fd: int) -> int:
    """Return a duplicate of ``fd`` whose number is close to the limit (``RLIMIT_NOFILE``).

    Scripts that become daemons close a range from 3 on. Not inherited over an exec. Where the
    limit leaves no room, any free number is taken.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    lowest = min(soft if soft > 0 else _HIGHEST, _HIGHEST) - _ROOM
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(lowest, 3))
    except OSError:
        return os.dup(fd)


def file_of(fd: int) -> tuple[int, int] | None:
    """Return what tells the file behind ``fd`` from every other; ``None`` where it is closed."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def watch(fd: int, hear: Callable[[Any], object] = lambda message: None) -> threading.Thread:
    """Kill this process group as soon as the pipe behind ``fd`` breaks; return the watching thread.

    ``fd`` is the reading end; ``hear`` is given each message that a ``Connection`` at the other end
    sends. It is duplicated, so that the caller (or a ``Connection`` around it) may close it. The
    process must lead a group of its own, or it takes its neighbours along. Forked children do not
    watch: they are in the group. A script that closes the descriptor is watched no more.
    """
    own = Connection(out_of_the_way(fd), writable=False)
    asked = own, file_of(own.fileno()), hear
    thread = threading.Thread(target=_wait_and_kill, args=asked, name="lifeline", daemon=True)
    thread.start()
    return thread


def _wait_and_kill(
    control: Connection, pipe: tuple[int, int] | None, hear: Callable[[Any], object]
) -> None:
    try:
        while file_of(control.fileno()) == pipe:
            hear(control.recv())
    except (EOFError, OSError):
        os.killpg(os.getpgid(0), signal.SIGKILL)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends; the process group is left alone.

    For a run in the foreground, which shares the terminal's process group with its parent
    (``prctl(2)``, PR_SET_PDEATHSIG). Does nothing where the system has no such call.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
