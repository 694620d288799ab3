"""The accelerator of this process, as torch sees it; for a process whose script has imported torch.

A kind of device that autofit does not know counts as no accelerator. No function starts the device,
except where it says so: a script may have to fork first. Without a device in use, memory counts as
zero. Sizes are bytes.

Source: https://docs.pytorch.org/docs/stable/accelerator.html. torch has nothing there for what is
read from the module of the device here, such as ``torch.cuda``.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

import torch

from autofit.facts import HOST
from autofit.strategies.support import memory
from autofit.worker import meter

RECORDED = 1_000_000
"""Most events of the allocator that ``record_allocations`` keeps; older ones are dropped."""


def device() -> str:
    """Return the kind of device that a script would use, such as ``"cuda"``, or ``"cpu"``."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return HOST if found is None or found.type not in meter.KINDS else found.type


def _module() -> Any:
    """Return torch's module for this kind of device, such as ``torch.cuda``; ``None`` without."""
    found = torch.accelerator.current_accelerator()
    if found is None or found.type not in meter.KINDS:
        return None
    return torch.get_device_module(found)


def _started() -> Any:
    """Return torch's module for the device if the script uses it."""
    module = _module()
    return module if module is not None and module.is_initialized() else None


def devices() -> int:
    """Return how many devices a script would see."""
    module = _module()
    return 0 if module is None else int(module.device_count())


def started() -> bool:
    """Return whether the script uses an accelerator."""
    return _started() is not None


def synchronize() -> None:
    """Wait until the device has finished all work that was queued."""
    if started():
        torch.accelerator.synchronize()


def allocated() -> int:
    """Return what tensors hold on the current device."""
    return torch.accelerator.memory_allocated() if started() else 0


def reserved() -> int:
    """Return what torch's allocator holds on the current device."""
    return torch.accelerator.memory_reserved() if started() else 0


def most_reserved() -> int:
    """Return the most that torch's allocator has held."""
    return torch.accelerator.max_memory_reserved() if started() else 0


def free_and_total() -> tuple[int, int]:
    """Return what is free on the current device for all processes, and its size; starts it."""
    free, total = _module().mem_get_info()
    return int(free), int(total)


def usable() -> int:
    """Return how much of the current device this process may use; starts the device."""
    module = _module()
    share = module.get_per_process_memory_fraction()
    return int(module.get_device_properties().total_memory * share)


def name() -> str:
    """Return the name of the current device; starts the device."""
    return str(_module().get_device_name())


def uuid() -> str:
    """Return what no other device in the world is called; starts the device."""
    return str(_module().get_device_properties().uuid)


def refused() -> int:
    """Return how many allocations have failed."""
    # Flattening the statistics, as ``memory_stats`` does, takes longer than most kernels.
    module = _started()
    return 0 if module is None else int(module.memory_stats_as_nested_dict().get("num_ooms", 0))


def given_out() -> tuple[int, int, int]:
    """Return what the allocator has given out now, at most, and how much of it was rounded up."""
    stats = _module().memory_stats_as_nested_dict()
    blocks = stats["allocated_bytes"]["all"]
    requested = stats["requested_bytes"]["all"]["current"]
    return int(blocks["current"]), int(blocks["peak"]), int(blocks["current"] - requested)


def reset_peak() -> None:
    """Set the peaks of the allocator to the present use."""
    torch.accelerator.reset_peak_memory_stats()


def empty_cache() -> None:
    """Give the allocator's unused memory back to the device."""
    if started():
        torch.accelerator.empty_cache()


def empty_host_cache() -> None:
    """Give pinned host memory back that no tensor uses."""
    if started():
        memory.empty_host_cache()


def generators() -> tuple[torch.Generator, ...]:
    """Return the random generators of the devices in use."""
    return tuple(getattr(_started(), "default_generators", ()))


def recording() -> bool:
    """Return whether a graph of kernels is being recorded, during which nothing may wait."""
    capturing = getattr(_started(), "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())


class Moment:
    """A moment in the work of the device, or of the host if no device is in use."""

    def __init__(self) -> None:
        self._event: torch.Event | None = None
        self._host = time.perf_counter()
        if (module := _started()) is not None:
            self._event = module.Event(enable_timing=True)
            self._event.record()

    def until(self, later: Moment) -> float:
        """Return the seconds until a ``later`` moment, which the device has reached."""
        if self._event is None or later._event is None:
            return later._host - self._host
        return float(self._event.elapsed_time(later._event)) / 1000


# --- PyTorch's memory snapshot: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html ------


def record_allocations() -> None:
    """Record all events of the allocator, with the Python stack of each, from now on.

    Does nothing if torch keeps no such record on this kind of device.
    """
    if (memory := _recorder()) is not None:
        memory._record_memory_history(max_entries=RECORDED, stacks="python")


def recorded_allocations() -> bytes | None:
    """Return the snapshot as ``memory_viz`` reads it, and stop recording; ``None`` if none is."""
    if (memory := _recorder()) is None:
        return None
    found = pickle.dumps(memory._snapshot())
    memory._record_memory_history(enabled=None)
    return found


def _recorder() -> Any:
    memory = getattr(_module(), "memory", None)
    return memory if hasattr(memory, "_record_memory_history") else None
