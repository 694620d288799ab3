"""Stores autograd's saved tensors in host memory, for a chunk that cannot be divided.

Smaller pieces of a chunk that drew random numbers would draw others, which the script's outputs do
not match. Such a chunk runs again with the same draws, and its graph needs almost no device memory:
backward copies each tensor back when it needs it. ``torch.autograd.graph.save_on_cpu`` does the
same, with three differences. Here the parameters stay on the device. The strides are preserved, so
that backward runs the same kernels. And the memory is Python's own: no limit of torch's CPU
allocator counts it, and no cache of pinned memory retains it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from autofit.strategies.support.memory import laid_out

HUGE_PAGES = 14
"""Linux's ``MADV_HUGEPAGE``."""
LARGE = 1 << 20
"""Larger allocations come directly from the system: they are few."""


@dataclass(frozen=True, slots=True)
class _Hosted:
    """A tensor's content in host memory, with what is needed to rebuild the tensor."""

    content: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Hosted:
        """Copy ``tensor`` to the host."""
        source, stride = laid_out(tensor)
        return cls(_copied(source), tensor.shape, stride, tensor.device)

    def back(self) -> torch.Tensor:
        """Return the tensor on its device."""
        there = torch.empty(self.content.shape, dtype=self.content.dtype, device=self.device)
        return there.copy_(self.content).as_strided(self.shape, self.stride)


def _pages(size: int) -> mmap:
    """Return memory in large pages if the system has them: page faults dominate otherwise."""
    if sys.platform != "linux":
        return mmap(-1, size)
    memory = mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)  # shared memory has small pages
    with suppress(OSError):
        memory.madvise(HUGE_PAGES)
    return memory


def copy_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in Python's own host memory."""
    if not _is_plain(tensor) or not tensor.numel():
        return tensor.to("cpu", copy=True)
    source, stride = laid_out(tensor)
    return _copied(source).as_strided(tensor.shape, stride)


def _copied(source: torch.Tensor) -> torch.Tensor:
    size = source.numel() * source.element_size()
    return torch.frombuffer(_memory(size), dtype=source.dtype).copy_(source)


def host_bytes(size: int, *, pinned: bool) -> torch.Tensor:
    """Return host memory; the caller writes to it. ``pinned``: for copies to and from a GPU."""
    if pinned:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.frombuffer(_memory(size), dtype=torch.uint8)


def _memory(size: int) -> bytearray | mmap:
    return bytearray(size) if size < LARGE else _pages(size)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor owns strided memory."""
    return tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def saved_on_host(parameters: Iterable[torch.Tensor]) -> saved_tensors_hooks:
    """Return a context in which autograd saves everything except ``parameters`` on the host.

    Gathered copies of sharded parameters go to the host too.
    """
    stay = {each.untyped_storage()._cdata for each in parameters if _is_plain(each)}

    def pack(tensor: torch.Tensor) -> Any:
        movable = _is_plain(tensor) and tensor.numel()
        if not movable or tensor.untyped_storage()._cdata in stay:
            return tensor
        return _Hosted.of(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        tensor: torch.Tensor = packed.back() if isinstance(packed, _Hosted) else packed
        return tensor

    return saved_tensors_hooks(pack, unpack)
