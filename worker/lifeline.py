"""The child's side of "nothing outlives its parent". Imports only the standard library.

The parent holds the other end of a pipe open for as long as it wants the child to live. However
the parent goes, the kernel closes that end, and the child ends its whole process group. What the
parent has to say meanwhile comes through the same pipe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1


def watch(fd: int, hear: Callable[[Any], object] = lambda message: None) -> threading.Thread:
    """Kill this process group as soon as the pipe behind ``fd`` breaks; return the watching thread.

    ``fd`` is the reading end; ``hear`` is given each message that a ``Connection`` at the other end
    sends. It is duplicated, so that the caller (or a ``Connection`` around it) may close it. The
    process must lead a group of its own, or it takes its neighbours along. Forked children do not
    watch: they are in the group.
    """
    own = Connection(os.dup(fd), writable=False)  # not inherited over an exec
    thread = threading.Thread(target=_wait_and_kill, args=(own, hear), name="lifeline", daemon=True)
    thread.start()
    return thread


def _wait_and_kill(control: Connection, hear: Callable[[Any], object]) -> None:
    try:
        while True:
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
