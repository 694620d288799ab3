"""An NVIDIA GPU: torch's allocator for what tensors hold, NVML for what the process occupies.

Written without a GPU at hand: it has been type-checked, not run. What the third issue must try:
the context's size as measured here, the cap's edge, and NVML inside a container.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from autofit.exceptions import WorkerError
from autofit.worker.meter import nvml
from autofit.worker.meter.base import NEAR, Peak

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


class CudaMeter:
    """Reads ``torch.cuda.memory_stats`` and caps torch's allocator.

    The budget counts the CUDA context too, so the allocator gets the cap less the context, which is
    measured first. CUDA is never started by the meter: a script may have to fork before.
    """

    device = "cuda"

    def __init__(self, cap: int | None = None) -> None:
        self._cap = cap
        self._armed = False
        self._context = 0
        self._used_before = [_or_zero(partial(nvml.used_bytes, i)) for i in range(nvml.count())]
        self._refused_before = 0

    @property
    def capacity(self) -> int | None:
        """The cap on what the process occupies; ``None`` when there is none."""
        return self._cap

    @property
    def context(self) -> int:
        """Bytes of the CUDA context; 0 until CUDA has started."""
        return self._context

    def arm(self) -> None:
        """Let the cap hold as soon as the script starts CUDA."""
        if not self._armed:
            self._armed = True
            _torch().cuda._lazy_call(self._started)

    def _started(self) -> None:
        """Measure the context and cap what is left; runs while torch starts CUDA."""
        _torch().empty(1, device="cuda")  # the context is complete after a first allocation
        self._context = self._occupied()
        self._apply()

    def set_cap(self, size: int | None) -> None:
        """Let the process occupy at most ``size`` bytes of the device; ``None`` lifts the cap."""
        self._cap = size
        if _torch().cuda.is_initialized():
            self._apply()

    def _apply(self) -> None:
        cuda = _torch().cuda
        total = int(cuda.get_device_properties(cuda.current_device()).total_memory)
        room = total if self._cap is None else max(0, self._cap - self._context)
        cuda.set_per_process_memory_fraction(min(1.0, room / total))

    def current(self) -> int:
        """Return the bytes held by tensors now."""
        return int(_torch().cuda.memory_allocated())

    def peak(self) -> Peak:
        """Return the worst moment since the last ``reset``.

        ``device`` is the larger of what NVML sees now and the context with torch's own peak.
        """
        cuda = _torch().cuda
        if not cuda.is_initialized():
            return Peak(0, 0, 0)
        allocated = int(cuda.max_memory_allocated())
        reserved = int(cuda.max_memory_reserved())
        return Peak(allocated, reserved, max(self._occupied(), reserved + self._context))

    def reset(self) -> None:
        """Let the peak start again from what is held now.

        The context has grown if libraries were loaded meanwhile: the cap follows it.
        """
        cuda = _torch().cuda
        if cuda.is_initialized():
            context = self._occupied() - int(cuda.memory_reserved())
            if context > self._context:
                self._context = context
                self._apply()
            cuda.reset_peak_memory_stats()
        self._refused_before = self.refused()

    def release(self) -> None:
        """Empty the cache of torch's allocator."""
        if _torch().cuda.is_initialized():
            _torch().cuda.empty_cache()

    def retries(self) -> int:
        """Return how often the allocator emptied its cache to go on."""
        if not _torch().cuda.is_initialized():
            return 0
        stats = _torch().cuda.memory_stats_as_nested_dict()  # unflattened: asked after each step
        return int(stats.get("num_alloc_retries", 0))

    def refused(self) -> int:
        """Return how many allocations failed."""
        return int(_torch().cuda.memory_stats().get("num_ooms", 0))

    def short(self) -> bool:
        """Return whether an allocation failed, or the peak came near the cap."""
        near = self._cap is not None and self.peak().device > NEAR * self._cap
        return near or self.refused() > self._refused_before

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it."""
        if _torch().cuda.is_initialized():
            _torch().cuda.synchronize()

    def _occupied(self) -> int:
        """Return what NVML says the process occupies; else the growth of the whole device."""
        index = int(_torch().cuda.current_device())
        own = _or_zero(lambda: nvml.process_bytes(index, os.getpid()) or 0)
        if own or index >= len(self._used_before):
            return own
        return max(0, _or_zero(partial(nvml.used_bytes, index)) - self._used_before[index])


def _torch() -> ModuleType:
    import torch

    return torch


def _or_zero(read: Callable[[], int]) -> int:
    """Return what ``read`` returns; 0 where the driver does not answer."""
    try:
        return read()
    except WorkerError:
        return 0
