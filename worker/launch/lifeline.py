"""Ends a child process when its parent ends. Imports only the standard library.

The parent keeps one end of a pipe open while the child is to run. When the parent ends, in
whatever way, the kernel closes that end, and the child kills its whole process group. The same
pipe carries the parent's messages.
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
"""Limit of descriptor numbers: the kernel's table of descriptors takes 8 bytes for each."""
_SPARE = 16
"""Free descriptor numbers between the lowest that is tried and the limit."""


def out_of_the_way(fd: int) -> int:
    """Return a duplicate of ``fd`` whose number is close to the limit (``RLIMIT_NOFILE``).

    Scripts that become daemons close the descriptors from 3 on; a high number is often spared.
    The duplicate is closed on exec. If no number near the limit is free, any free number is used.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    lowest = min(soft if soft > 0 else _HIGHEST, _HIGHEST) - _SPARE
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(lowest, 3))
    except OSError:
        return os.dup(fd)


def file_of(fd: int) -> tuple[int, int] | None:
    """Return device and inode of the file behind ``fd``; ``None`` if ``fd`` is closed."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def watch(fd: int, hear: Callable[[Any], object] = lambda message: None) -> threading.Thread:
    """Kill this process group when the pipe behind ``fd`` breaks; return the watching thread.

    ``fd`` is the reading end. It is duplicated, so the caller may close it. ``hear`` is called with
    each message that a ``Connection`` at the other end sends.

    The process must lead its own process group; otherwise the parent's group is killed too. Forked
    children need no watch of their own, because they are in the group. If the script closes the
    duplicate, the watch ends.
    """
    own = Connection(out_of_the_way(fd), writable=False)
    watched = own, file_of(own.fileno()), hear
    thread = threading.Thread(target=_wait_and_kill, args=watched, name="lifeline", daemon=True)
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
    """Let the kernel kill this process, but not its process group, when its parent ends.

    A run in the foreground needs this, because it shares the terminal's process group with its
    parent. See PR_SET_PDEATHSIG in prctl(2). On systems without prctl this does nothing.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
