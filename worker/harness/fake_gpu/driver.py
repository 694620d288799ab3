"""Answers for the CUDA driver: what ``torch.cuda`` calls in C++, as a named card would answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from autofit.facts import Hardware
from autofit.worker.harness.fake_gpu.allocator import CachingAllocator
from autofit.worker.harness.fake_gpu.tensors import GPU, TO_CPP
from autofit.worker.harness.patching.patches import Patches


class Stream:
    """A stream: work is not queued, so there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device, self.cuda_stream, self.stream_id, self.device_index = GPU, 0, 0, 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def synchronize(self, *_: Any) -> None:
        """Do nothing."""

    wait_stream = wait_event = synchronize

    def query(self) -> bool:
        """Return that all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Return that no graph is captured."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event of now."""
        event = event or Event()
        event.record()
        return event


class Event:
    """An event: the time of the host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def record(self, *_: Any) -> None:
        """Note the time."""
        self._time = time.perf_counter()

    def synchronize(self, *_: Any) -> None:
        """Do nothing."""

    wait = synchronize

    def query(self) -> bool:
        """Return that it has happened."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Return the milliseconds until ``other``."""
        return 1e3 * (other._time - self._time)


class Generator(torch._C.Generator):
    """A generator; that of the GPU is one of the CPU, because nothing is drawn."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        """Return a generator of the CPU."""
        return super().__new__(cls)


def answer(card: Hardware, allocator: CachingAllocator, patches: Patches) -> None:
    """Let ``torch.cuda`` answer as ``card`` would, until ``patches`` are undone."""
    capability = card.capability or (9, 0)
    properties = SimpleNamespace(
        name=card.name,
        total_memory=card.total_bytes,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=card.multiprocessors,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448,
        warp_size=32,
        is_integrated=False,
        is_multi_gpu_board=False,
        L2_cache_size=50 << 20,
        uuid="00000000-0000-0000-0000-000000000000",
        gcnArchName="",
    )
    cuda = torch.cuda
    generators = (torch.Generator(),)

    def memory() -> tuple[int, int]:
        return max(0, card.total_bytes - allocator.reserved.current), card.total_bytes

    in_cpp: dict[str, Callable[..., Any]] = {
        "_cuda_init": lambda: None,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda index: None,
        "_cuda_exchangeDevice": lambda index: 0,
        "_cuda_maybeExchangeDevice": lambda index: 0,
        "_cuda_synchronize": lambda: None,
        "_cuda_emptyCache": allocator.release,
        "_cuda_memoryStats": lambda index: allocator.statistics(),
        "_cuda_resetPeakMemoryStats": lambda index: allocator.reset_peaks(),
        "_cuda_resetAccumulatedMemoryStats": lambda index: None,
        "_cuda_setMemoryFraction": lambda share, index: None,
        "_cuda_getMemoryFraction": lambda index: 1.0,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_getArchFlags": lambda: f"sm_{capability[0]}{capability[1]}",
        "_accelerator_getAccelerator": lambda: torch.device(GPU.type),
        "_accelerator_synchronizeDevice": lambda index: None,
        "_accelerator_getDeviceIndex": lambda: 0,
        "_accelerator_setDeviceIndex": lambda index: None,
        "_accelerator_emptyCache": allocator.release,
        "_accelerator_emptyHostCache": lambda: None,
        "_accelerator_getStream": lambda index: Stream(),
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_getDeviceStats": lambda index: allocator.statistics(),
        "_accelerator_resetPeakStats": lambda index: allocator.reset_peaks(),
        "_accelerator_resetAccumulatedStats": lambda index: None,
        "_accelerator_getMemoryInfo": lambda index: memory(),
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getCurrentRawStream": lambda index: 0,
        "_scatter": lambda tensor, *_: (tensor.to(GPU),),  # for one device
    }
    for name, function in in_cpp.items():
        patches.set(torch._C, name, function)
    in_python: dict[str, Any] = {
        "_initialized": True,
        "_exchange_device": in_cpp["_cuda_exchangeDevice"],
        "_maybe_exchange_device": in_cpp["_cuda_maybeExchangeDevice"],
        "_is_in_bad_fork": in_cpp["_cuda_isInBadFork"],
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: capability >= (8, 0),
        "mem_get_info": lambda device=None: memory(),
        "utilization": lambda device=None: 0,
        "default_generators": generators,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "set_stream": lambda stream: None,
        "is_current_stream_capturing": lambda: False,
        "_sleep": lambda cycles: None,
    }
    for name, value in in_python.items():
        patches.set(cuda, name, value)
    patches.set(cuda.memory, "mem_get_info", in_python["mem_get_info"])
    patches.set(torch, "Generator", Generator)
    patches.wrap(torch._C, "_group_tensors_by_device_and_dtype", _grouped)


def _grouped(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the grouping of tensors by device, with the GPU as Python code knows it."""

    def grouped(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        return {(GPU if d == TO_CPP else d, kind): of for (d, kind), of in found.items()}

    return grouped
