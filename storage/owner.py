"""Who runs a trial: one process on one host, told apart from a later process of the same number."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Self

import psutil

TOLERANCE = 2.0
"""Seconds two readings of one start time may differ: the boot time is known to the second."""


def _started(pid: int) -> float | None:
    """Return when ``pid`` started, in seconds after boot; ``None`` when it is gone."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        # Seconds after boot, because the wall clock may be set while the process runs.
        return float(process.create_time() - psutil.boot_time())
    except psutil.NoSuchProcess:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that holds trials."""

    host: str
    pid: int
    started: float
    """Seconds after boot at which the process started."""

    @classmethod
    def current(cls) -> Self:
        """Return the process that asks."""
        pid = os.getpid()
        return cls(host=socket.gethostname(), pid=pid, started=_started(pid) or 0.0)

    def alive(self) -> bool | None:
        """Return whether the process still runs; ``None`` (nobody can tell) on another host."""
        if self.host != socket.gethostname():
            return None
        started = _started(self.pid)
        return started is not None and abs(started - self.started) < TOLERANCE

    def same(self, other: Owner) -> bool:
        """Return whether both are the same process, read at different times."""
        return (self.host, self.pid) == (other.host, other.pid) and (
            abs(self.started - other.started) < TOLERANCE
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"
