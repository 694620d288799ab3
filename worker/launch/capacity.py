"""Tells whether this machine can run a process beside a running launch. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from autofit import host
from autofit.worker.launch.reaper import processes, with_descendants

CORES = 4
"""Least number of cores; with fewer, a second process would slow down the steps of the first."""
SHARE = 0.5
"""Largest share of the free host memory that the second process may need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The host memory and cores of a machine, and what a running launch uses of them."""

    processes: int
    """Processes of the launch, with data loader workers."""
    peak: int
    """Most host memory that they used, in bytes; the second process may need as much."""
    cores: int
    free: int
    """Bytes that a new process could allocate."""

    @property
    def enough(self) -> bool:
        """Whether a second process of the same kind disturbs the first one little."""
        free_cores = self.cores - self.processes
        return self.cores >= CORES and free_cores >= 1 and self.peak <= SHARE * self.free


def beside(pids: Collection[int]) -> Capacity:
    """Return the capacity beside the processes ``pids`` and their descendants."""
    mine = with_descendants(pids, processes())
    return Capacity(
        processes=len(mine),
        peak=sum(_peak(process.pid) for process in mine),
        cores=len(os.sched_getaffinity(0)),
        free=host.free_bytes(),
    )


def _peak(pid: int) -> int:
    """Return the peak of a process's resident memory (``VmHWM`` in proc(5)); 0 if it has ended."""
    for line in host.read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
