"""What NVIDIA's driver says, through NVML. Imports no torch, and pynvml only when called."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autofit.exceptions import WorkerError
from autofit.strategies.facts import Hardware


@contextmanager
def _driver() -> Iterator[Any]:
    """Yield pynvml, initialised; raise ``WorkerError`` where the driver does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise WorkerError(f"the NVIDIA driver does not answer: {error}") from error


def visible(environment: dict[str, str] | None = None) -> tuple[str, ...] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES``; ``None`` when it is not set."""
    text = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _handle(nvml: Any, index: int) -> Any:
    """Return the handle of the ``index``-th device that CUDA would show this process."""
    entries = visible()
    if entries is not None and index >= len(entries):
        raise WorkerError(
            f"no GPU {index}: CUDA_VISIBLE_DEVICES shows {len(entries)}; ask for fewer"
        )
    name = str(index) if entries is None else entries[index]
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)


def count() -> int:
    """Return how many GPUs this process may use; 0 where there is no driver."""
    try:
        with _driver() as nvml:
            there = int(nvml.nvmlDeviceGetCount())
    except WorkerError:
        return 0
    entries = visible()
    return there if entries is None else min(there, len(entries))


def hardware(index: int) -> Hardware:
    """Return what the ``index``-th visible GPU is; raise ``WorkerError`` when it is not there."""
    with _driver() as nvml:
        handle = _handle(nvml, index)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        return Hardware(
            device="cuda",
            name=str(nvml.nvmlDeviceGetName(handle)),
            total_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            capability=(int(major), int(minor)),
        )


def free_bytes(index: int) -> int:
    """Return the bytes nobody holds on the ``index``-th visible GPU."""
    with _driver() as nvml:
        return int(nvml.nvmlDeviceGetMemoryInfo(_handle(nvml, index)).free)


def used_bytes(index: int) -> int:
    """Return the bytes that all processes together hold on the ``index``-th visible GPU."""
    with _driver() as nvml:
        return int(nvml.nvmlDeviceGetMemoryInfo(_handle(nvml, index)).used)


def process_bytes(index: int, pid: int) -> int | None:
    """Return what ``pid`` occupies on the ``index``-th visible GPU.

    ``None`` where the driver does not say: in a container it knows processes by other numbers.
    """
    with _driver() as nvml:
        handle = _handle(nvml, index)
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == pid and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
    return None
