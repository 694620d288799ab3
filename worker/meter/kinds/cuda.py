"""NVIDIA's GPUs: tensors are counted by torch's allocator, the whole process by NVML.

The budget covers all memory of the process on the device. torch's allocator does not hold all of
it. The rest is the CUDA context (about half a GiB, more once libraries have loaded their kernels),
NCCL's buffers, and managed memory, such as a paged optimizer's. This module calls it ``context``.
It is measured when CUDA starts and sampled between steps. torch's allocator may use the rest of the
budget. The allocator records its own peak exactly; a peak of the context between two samples is
missed.

NVML counts managed memory for the card but for no process. The context is therefore the process's
memory plus what no process holds, as far as it has grown since CUDA started. In a container, NVML
may number processes differently, so that this process cannot be found. The context is then what the
card holds more than before CUDA started. If that grows by more than ``LIBRARIES`` between two
samples, the growth is attributed to other processes. Without NVML, the context is assumed to be
``ASSUMED`` bytes.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from autofit.exceptions import WorkerError
from autofit.facts import Hardware
from autofit.worker.meter import nvml
from autofit.worker.meter.base import NEAR, Card, DeviceKind, Load, Meter, Peak

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType


T = TypeVar("T")

LOCAL_RANK = "LOCAL_RANK"
"""The variable with which ``torchrun`` assigns a process one of the visible cards."""
ASSUMED = 768 << 20
"""Bytes assumed for a CUDA context that cannot be measured."""
LIBRARIES = 1 << 30
"""Bytes by which the context may grow between two samples if NVML does not find this process."""
_CAPABILITY = (75, 76)
"""``CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`` and ``_MINOR``."""


class Cuda(DeviceKind):
    """The GPUs that the CUDA driver shows, or MIG instances of them."""

    name = "cuda"
    visible = nvml.VISIBLE
    backend = "nccl"

    def cards(self) -> tuple[Card, ...]:
        """Return the visible GPUs; without NVML, the free memory is unknown."""
        try:
            return nvml.cards()
        except WorkerError:
            return _cards_of_driver()

    def loads(self) -> tuple[Load, ...]:
        """Return what NVML reports of each GPU."""
        return nvml.loads()

    def measured_cards(self, variables: Mapping[str, str]) -> tuple[Card, ...]:
        """Return the GPUs that NVML reports."""
        return nvml.cards(variables)

    def hardware(self, index: int) -> Hardware:
        """Return what the driver says of a GPU."""
        return self._card(index).hardware

    def free_bytes(self, index: int) -> int:
        """Return the free bytes of a GPU."""
        return self._card(index).free

    def _card(self, index: int) -> Card:
        found = self.cards()
        if index >= len(found):
            raise WorkerError(f"no GPU {index}: {len(found)} are visible here; ask for fewer")
        return found[index]

    def meter(self, cap: int | None) -> Meter:
        """Return a meter of the GPU that a launcher gave this process, or of torch's current."""
        local = os.environ.get(LOCAL_RANK, "")  # some launchers set -1 for a single process
        return CudaMeter(cap, int(local) if local.isdecimal() else None)


KIND = Cuda()


class CudaMeter:
    """Reads ``torch.cuda.memory_stats`` and caps torch's allocator.

    The meter never starts CUDA, because a script may have to fork first. ``index``: position of
    the card among those that CUDA shows; by default, the current device of torch.
    """

    device = "cuda"

    def __init__(self, cap: int | None = None, index: int | None = None) -> None:
        self._cap = cap
        self._index = index
        self._armed = False
        self._capped = cap is not None
        """Whether a cap has ever been set; if not, torch's allocator is not changed."""
        self._context = 0
        self._worst_context = 0
        self.note_others()
        self._card: Any = None
        """NVML's handle of the device on which CUDA was started."""
        self._held_before = 0
        self._first: nvml.Shares | None = None
        """The card's use just after CUDA started, when this process had no managed memory."""
        self._refused_before = 0

    @property
    def capacity(self) -> int | None:
        """The cap on the process's memory; ``None`` without one."""
        return self._cap

    @property
    def context(self) -> int:
        """Bytes outside torch's allocator; 0 until CUDA has started."""
        return self._context

    def note_others(self) -> None:
        """Read what other processes hold on the cards, before CUDA starts."""
        self._before = {card.uuid: card for card in _query(nvml.cards) or ()}

    def arm(self) -> None:
        """Apply the cap when the script starts CUDA."""
        if not self._armed:
            self._armed = True
            _torch().cuda._lazy_call(self._started)

    def _started(self) -> None:
        """Measure the context and cap the allocator at the rest; torch calls it at CUDA's start."""
        cuda = _torch().cuda
        if self._index is not None and self._index >= cuda.device_count():
            self._index = None  # the script has set CUDA_VISIBLE_DEVICES itself
        # The context is only complete after a first allocation.
        _torch().empty(1, device="cuda" if self._index is None else f"cuda:{self._index}")
        uuid = str(cuda.get_device_properties(self._index).uuid)
        self._card = nvml.handle_of(uuid)
        known = (f"{kind}-{uuid}" for kind in ("GPU", "MIG"))
        for before in (self._before[name] for name in known if name in self._before):
            self._held_before = before.held
        self._context = self._worst_context = self._beyond_allocator(at_start=True)
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
        limit = total if self._cap is None else max(0, self._cap - self._context)
        cuda.set_per_process_memory_fraction(min(1.0, limit / total), self._index)
        if int(cuda.memory_reserved(self._index)) > limit:  # its cache exceeds the new limit
            cuda.empty_cache()

    def current(self) -> int:
        """Return the bytes that tensors hold now."""
        return int(_torch().cuda.memory_allocated(self._index))

    def peak(self) -> Peak:
        """Return the peak since the last ``reset``.

        ``device`` is the sum of the allocator's peak and the largest sample of the context. They
        may be from different moments, so the sum may be too high.
        """
        cuda = _torch().cuda
        if not cuda.is_initialized():
            return Peak(0, 0, 0)
        self.sample()
        reserved = int(cuda.max_memory_reserved(self._index))
        allocated = int(cuda.max_memory_allocated(self._index))
        return Peak(allocated, reserved, reserved + self._worst_context)

    def sample(self) -> None:
        """Measure the context now; if it has grown, lower the allocator's limit by as much.

        If the allocator's cache exceeds the new limit, it is emptied. A card of the budget's size
        would force the allocator to do the same.
        """
        if not _torch().cuda.is_initialized():
            return
        self._worst_context = max(self._worst_context, self._beyond_allocator())
        if self._worst_context > self._context:
            self._context = self._worst_context
            self._apply()

    def reset(self) -> None:
        """Set the peak to the present use."""
        if _torch().cuda.is_initialized():
            self._context = self._worst_context = self._beyond_allocator()
            self._apply()
            _torch().cuda.reset_peak_memory_stats(self._index)
        self._refused_before = self.refused()

    def available(self) -> int | None:
        """Return the bytes that the process occupies plus the free bytes of the card.

        Less than the cap if other processes use the card. ``None`` if unknown.
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
        """Return how often the allocator emptied its cache and tried again."""
        if not _torch().cuda.is_initialized():
            return 0
        # This runs after each step, and flattening the statistics takes longer.
        stats = _torch().cuda.memory_stats_as_nested_dict(self._index)
        return int(stats.get("num_alloc_retries", 0))

    def refused(self) -> int:
        """Return how many allocations failed."""
        return int(_torch().cuda.memory_stats(self._index).get("num_ooms", 0))

    def short(self) -> bool:
        """Return whether an allocation failed or the peak came near the cap."""
        near = self._cap is not None and self.peak().device > NEAR * self._cap
        return near or self.refused() > self._refused_before

    def synchronize(self) -> None:
        """Wait until the device has finished all work that was queued."""
        if _torch().cuda.is_initialized():
            _torch().cuda.synchronize(self._index)

    def _beyond_allocator(self, *, at_start: bool = False) -> int:
        """Return the bytes that the process occupies besides torch's allocator, or an estimate."""
        if self._card is None:
            return ASSUMED
        shares = _query(lambda: nvml.shares(self._card, os.getpid()))
        if shares is None:  # a GPU that shares the machine's memory
            return ASSUMED
        reserved = int(_torch().cuda.memory_reserved(self._index))
        if shares.own is not None:
            self._first = self._first or shares
            return max(0, shares.own + shares.managed(self._first) - reserved)
        context = shares.held - self._held_before - reserved  # NVML does not find this process
        theirs = not at_start and context > self._context + LIBRARIES
        return self._context if theirs else max(0, context)


def _torch() -> ModuleType:
    import torch

    return torch


def _query(read: Callable[[], T]) -> T | None:
    """Return the result of ``read``; ``None`` if the driver does not answer."""
    try:
        return read()
    except (WorkerError, RuntimeError):  # torch's AcceleratorError is a RuntimeError
        return None


@cache
def _cards_of_driver() -> tuple[Card, ...]:
    """Return the visible GPUs as CUDA's driver library lists them; none without a driver.

    Containers often have the driver's ``compute`` part without ``utility``, to which NVML belongs.
    The free memory of a card and the processes on it are then unknown. The call makes no CUDA
    context, so it allocates no GPU memory.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_card(cuda, index) for index in range(count.value))


def _card(cuda: ctypes.CDLL, index: int) -> Card:
    device, total = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    capability = []
    for attribute in _CAPABILITY:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return Card(
        entry=str(index),
        uuid="",
        hardware=Hardware(
            device="cuda",
            name=name.value.decode(errors="replace"),
            total_bytes=total.value,
            capability=(capability[0], capability[1]),
        ),
        free=total.value,
        held=0,
        holders=(),
        measured=False,
    )
