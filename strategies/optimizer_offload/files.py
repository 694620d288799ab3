"""Tensors in files on disk, for optimizer state that host memory has no room for.

The files have no names: they are gone as soon as the process has ended, however it ends. Their
pages are in the system's cache as far as memory is free. A GPU copies from pinned memory only, so
each copy goes through a pinned buffer; torch reuses the buffers.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from typing import Any

import torch

from autofit.exceptions import Refused
from autofit.strategies.support.memory import on_accelerator
from autofit.units import format_size

FOLDER = "AUTOFIT_OFFLOAD_DIR"
"""Environment variable with the folder of the files; the system's temporary folder without it."""
MAX_PENDING = 4
"""Copies from the device that wait in pinned memory to be written."""


class StateFiles:
    """Makes tensors in files, and copies between them and a device."""

    def __init__(self) -> None:
        self._folder = os.environ.get(FOLDER) or tempfile.gettempdir()
        self._maps: dict[int, mmap.mmap] = {}
        """The mapped files, by the address at which their tensors begin."""
        self._pending: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
        """Events, pinned copies, and where they are to be written."""

    def reserve(self, size: int) -> None:
        """Raise ``Refused`` if the folder has no room for ``size`` bytes."""
        try:
            found = os.statvfs(self._folder)
        except OSError as error:
            raise Refused(f"{self._folder} cannot take the optimizer's state: {error}") from error
        free = found.f_bavail * found.f_frsize
        if free < size:
            raise Refused(
                f"the optimizer's state needs {format_size(size)}, and {self._folder} has "
                f"{format_size(free)} free; name another folder by {FOLDER}"
            )

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a vector in a file of its own; its memory on disk is reserved."""
        size = count * dtype.itemsize
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise Refused(f"{self._folder} cannot take the optimizer's state: {error}") from error
        found = torch.frombuffer(mapped, dtype=dtype)
        self._maps[found.data_ptr()] = mapped
        return found

    def read_ahead(self, tensor: torch.Tensor, start: int, count: int) -> None:
        """Let the system read ``count`` elements from ``start`` on while other work goes on."""
        mapped = self._maps.get(tensor.data_ptr())
        begin = start * tensor.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        if mapped is not None and begin < len(mapped):
            length = min(count * tensor.itemsize, len(mapped) - begin)
            mapped.madvise(mmap.MADV_WILLNEED, begin, length)

    def read(self, part: torch.Tensor, onto: torch.Tensor) -> None:
        """Copy ``part`` of a file to ``onto``, on the device."""
        if not on_accelerator(onto.device):
            onto.copy_(part)
            return
        pinned = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        pinned.copy_(part)
        onto.copy_(pinned, non_blocking=True)

    def write(self, value: torch.Tensor, part: torch.Tensor) -> None:
        """Copy ``value`` from the device to ``part`` of a file, at the next ``flush`` at last."""
        if not on_accelerator(value.device):
            part.copy_(value)
            return
        pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        pinned.copy_(value, non_blocking=True)
        event = torch.get_device_module(value.device).current_stream(value.device).record_event()
        self._pending.append((event, pinned, part))
        self.flush(MAX_PENDING)

    def flush(self, left: int = 0) -> None:
        """Write what is in pinned memory, but for the last ``left`` copies."""
        while len(self._pending) > left:
            event, pinned, part = self._pending.popleft()
            event.synchronize()
            part.copy_(pinned)
