"""Identifies the process that runs a trial, by its host, its id and its start time."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Self

import psutil

TOLERANCE = 2.0
"""Seconds by which two readings of one start time may differ; the boot time is in whole seconds."""


def _started(pid: int) -> float | None:
    """Return when ``pid`` started, in seconds after boot; ``None`` if it has ended."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        # Seconds after boot, because the wall clock may be changed while the process runs.
        return float(process.create_time() - psutil.boot_time())
    except psutil.NoSuchProcess:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that owns studies or trials."""

    host: str
    pid: int
    started: float
    """Seconds after boot at which the process started."""

    @classmethod
    def current(cls) -> Self:
        """Return the calling process."""
        pid = os.getpid()
        return cls(host=socket.gethostname(), pid=pid, started=_started(pid) or 0.0)

    def alive(self) -> bool | None:
        """Return whether the process still runs; ``None`` (unknown) for another host."""
        if self.host != socket.gethostname():
            return None
        started = _started(self.pid)
        return started is not None and abs(started - self.started) < TOLERANCE

    def same(self, other: Owner) -> bool:
        """Return whether both are the same process, also if read at different times."""
        return (self.host, self.pid) == (other.host, other.pid) and (
            abs(self.started - other.started) < TOLERANCE
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"
