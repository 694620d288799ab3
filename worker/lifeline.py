"""The child's side of "nothing outlives its parent". Imports only the standard library.

The parent holds the other end of a pipe open for as long as it wants the child to live. However
the parent goes, the kernel closes that end, and the child ends its whole process group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading

_PR_SET_PDEATHSIG = 1


def watch(fd: int) -> threading.Thread:
    """Kill this process group as soon as the pipe behind ``fd`` breaks; return the watching thread.

    ``fd`` is the reading end; what is written to it is thrown away. It is duplicated, so that the
    caller (or a ``Connection`` around it) may close it. The process must lead a group of its own,
    or it takes its neighbours along. Forked children do not watch: they are in the group.
    """
    own = os.dup(fd)  # not inherited over an exec
    thread = threading.Thread(target=_wait_and_kill, args=(own,), name="lifeline", daemon=True)
    thread.start()
    return thread


def _wait_and_kill(fd: int) -> None:
    while os.read(fd, 4096):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends; the process group is left alone.

    For a run in the foreground, which shares the terminal's process group with its parent
    (``prctl(2)``, PR_SET_PDEATHSIG). Does nothing where the system has no such call.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
