"""What the callbacks log: the peak of memory, what is left of it, and rescues."""

from __future__ import annotations

import resource

import psutil

from autofit.worker.meter import accelerator
from autofit.worker.oom.attempt import survived_errors

GIB = 1 << 30
KIB = 1 << 10


class MemoryLog:
    """Reads the figures of this process; rescues count from the moment when it is made."""

    def __init__(self) -> None:
        self._before = survived_errors()

    def figures(self) -> dict[str, float]:
        """Return the figures by the names under which they are logged.

        - ``autofit/peak_gib``: the largest memory so far. On a GPU, what torch's allocator
          reserved; on the CPU, the memory of the process.
        - ``autofit/headroom_gib``: the memory that is left now. On a GPU this includes what the
          allocator holds without a tensor, and it respects a limit of the process's share.
        - ``autofit/rescues``: out-of-memory errors after which ``autofit run`` or
          ``@autofit.resilient`` went on.
        """
        peak, left = _on_gpu() if accelerator.started() else _on_cpu()
        return {
            "autofit/peak_gib": peak / GIB,
            "autofit/headroom_gib": left / GIB,
            "autofit/rescues": float(survived_errors() - self._before),
        }


def _on_gpu() -> tuple[int, int]:
    """Return the peak and the headroom of the current GPU, in bytes."""
    reserved, (free, _) = accelerator.reserved(), accelerator.free_and_total()
    left = min(free, max(0, accelerator.usable() - reserved))
    return accelerator.most_reserved(), left + reserved - accelerator.allocated()


def _on_cpu() -> tuple[int, int]:
    """Return the peak of this process and the memory that the host has left, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
    return peak, psutil.virtual_memory().available
