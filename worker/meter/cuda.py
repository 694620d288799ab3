"""An NVIDIA GPU: torch's allocator for what tensors hold, NVML for what the process occupies.

The budget is of the device, so it holds what is outside torch's allocator too: the CUDA context
(half a GiB or so, more once libraries have loaded their kernels), NCCL's buffers, and managed
memory such as that of paged optimizers. That part, ``context`` here, is measured when CUDA starts
and sampled between steps, and torch's allocator is capped at what is left. The allocator knows its
own peak to the byte; of the rest, what comes and goes between two samples is missed.

NVML counts managed memory for the card, but for no process. So that part is what the process holds
and what has come since CUDA was started that no process does. Where NVML knows processes by other
numbers (a container), others cannot be told from us: it is what the card holds more than before
CUDA was started, and a jump of more than ``LIBRARIES`` from one look to the next is taken for
theirs, managed memory of our own aside. Where there is no NVML, nobody knows: ``ASSUMED`` bytes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

from autofit.exceptions import WorkerError
from autofit.worker.meter import nvml
from autofit.worker.meter.base import NEAR, Peak

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

T = TypeVar("T")

ASSUMED = 768 << 20
"""Bytes of a CUDA context that nobody can measure."""
LIBRARIES = 1 << 30
"""Bytes by which what is outside the allocator may grow at once where only the card is seen."""


class CudaMeter:
    """Reads ``torch.cuda.memory_stats`` and caps torch's allocator.

    CUDA is never started by the meter: a script may have to fork before. ``index``: of the card it
    is about, among those that CUDA shows; of one rank of several, whichever the script has made
    the current one. Without it: the current one.
    """

    device = "cuda"

    def __init__(self, cap: int | None = None, index: int | None = None) -> None:
        self._cap = cap
        self._index = index
        self._armed = False
        self._capped = cap is not None
        """The allocator has been, or will be, told of a cap; an uncapped one is left alone."""
        self._context = 0
        self._worst_context = 0
        self._before = {card.uuid: card for card in _query(nvml.cards) or ()}
        self._card: Any = None
        """NVML's handle of the device CUDA was started on."""
        self._held_before = 0
        self._first: nvml.Shares | None = None
        """When CUDA had just been started: no managed memory was ours."""
        self._refused_before = 0

    @property
    def capacity(self) -> int | None:
        """The cap on what the process occupies; ``None`` when there is none."""
        return self._cap

    @property
    def context(self) -> int:
        """Bytes outside torch's allocator; 0 until CUDA has started."""
        return self._context

    def arm(self) -> None:
        """Let the cap hold as soon as the script starts CUDA."""
        if not self._armed:
            self._armed = True
            _torch().cuda._lazy_call(self._started)

    def _started(self) -> None:
        """Measure the context and cap what is left; runs while torch starts CUDA."""
        cuda = _torch().cuda
        if self._index is not None and self._index >= cuda.device_count():
            self._index = None  # the script has chosen what it sees by itself
        # The context is complete after a first allocation.
        _torch().empty(1, device="cuda" if self._index is None else f"cuda:{self._index}")
        uuid = str(cuda.get_device_properties(self._index).uuid)
        self._card = nvml.handle_of(uuid)
        known = (f"{kind}-{uuid}" for kind in ("GPU", "MIG"))
        for before in (self._before[name] for name in known if name in self._before):
            self._held_before = before.held
        self._context = self._worst_context = self._outside_allocator(at_start=True)
        self._apply()

    def set_cap(self, size: int | None) -> None:
        """Let the process occupy at most ``size`` bytes of the device; ``None`` lifts the cap."""
        self._cap = size
        self._capped |= size is not None
        if _torch().cuda.is_initialized():
            self._apply()

    def _apply(self) -> None:
        if not self._capped:
            return
        cuda = _torch().cuda
        total = int(cuda.get_device_properties(self._index).total_memory)
        room = total if self._cap is None else max(0, self._cap - self._context)
        cuda.set_per_process_memory_fraction(min(1.0, room / total), self._index)
        if int(cuda.memory_reserved(self._index)) > room:  # filled before that came
            cuda.empty_cache()

    def current(self) -> int:
        """Return the bytes held by tensors now."""
        return int(_torch().cuda.memory_allocated(self._index))

    def peak(self) -> Peak:
        """Return the worst moment since the last ``reset``.

        ``device`` is the allocator's peak and the worst of the samples of what is outside it,
        which need not have been at the same moment: never too low for that.
        """
        cuda = _torch().cuda
        if not cuda.is_initialized():
            return Peak(0, 0, 0)
        self.sample()
        reserved = int(cuda.max_memory_reserved(self._index))
        allocated = int(cuda.max_memory_allocated(self._index))
        return Peak(allocated, reserved, reserved + self._worst_context)

    def sample(self) -> None:
        """Look at what is outside torch's allocator now; the cap makes room for what has come.

        So does the allocator's cache, where it has filled that room: on a card of that size it
        would have had to.
        """
        if not _torch().cuda.is_initialized():
            return
        self._worst_context = max(self._worst_context, self._outside_allocator())
        if self._worst_context > self._context:
            self._context = self._worst_context
            self._apply()

    def reset(self) -> None:
        """Let the peak start again from what is held now."""
        if _torch().cuda.is_initialized():
            self._context = self._worst_context = self._outside_allocator()
            self._apply()
            _torch().cuda.reset_peak_memory_stats(self._index)
        self._refused_before = self.refused()

    def available(self) -> int | None:
        """Return the bytes that the process occupies and those that nobody does.

        Less than the cap when others have taken the card. ``None`` where nobody knows.
        """
        cuda = _torch().cuda
        if not cuda.is_initialized():
            return None
        free = _query(lambda: int(cuda.mem_get_info(self._index)[0]))
        reserved = int(cuda.memory_reserved(self._index))
        return None if free is None else self._context + reserved + free

    def release(self) -> None:
        """Empty the cache of torch's allocator."""
        if _torch().cuda.is_initialized():
            _torch().cuda.empty_cache()

    def retries(self) -> int:
        """Return how often the allocator emptied its cache to go on."""
        if not _torch().cuda.is_initialized():
            return 0
        # Unflattened: it is asked for after each step.
        stats = _torch().cuda.memory_stats_as_nested_dict(self._index)
        return int(stats.get("num_alloc_retries", 0))

    def refused(self) -> int:
        """Return how many allocations failed."""
        return int(_torch().cuda.memory_stats(self._index).get("num_ooms", 0))

    def short(self) -> bool:
        """Return whether an allocation failed, or the peak came near the cap."""
        near = self._cap is not None and self.peak().device > NEAR * self._cap
        return near or self.refused() > self._refused_before

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it."""
        if _torch().cuda.is_initialized():
            _torch().cuda.synchronize(self._index)

    def _outside_allocator(self, *, at_start: bool = False) -> int:
        """Return the bytes the process occupies outside torch's allocator, as far as is known."""
        if self._card is None:
            return ASSUMED
        shares = _query(lambda: nvml.shares(self._card, os.getpid()))
        if shares is None:  # a GPU that shares the machine's memory
            return ASSUMED
        reserved = int(_torch().cuda.memory_reserved(self._index))
        if shares.own is not None:
            self._first = self._first or shares
            return max(0, shares.own + shares.managed(self._first) - reserved)
        outside = shares.held - self._held_before - reserved  # we may be among the others
        theirs = not at_start and outside > self._context + LIBRARIES
        return self._context if theirs else max(0, outside)


def _torch() -> ModuleType:
    import torch

    return torch


def _query(read: Callable[[], T]) -> T | None:
    """Return what ``read`` returns; ``None`` where the driver does not answer."""
    try:
        return read()
    except (WorkerError, RuntimeError):  # torch's AcceleratorError is a RuntimeError
        return None
