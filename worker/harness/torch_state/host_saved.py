"""Keeps what autograd saves in host memory, for a chunk that has to fit as it is.

A chunk that drew random numbers and whose outputs the script has seen cannot be cut any further:
its pieces would draw anew. So it runs again with the same draws, and its graph holds next to
nothing of the device's memory; backward brings each tensor back as it comes to it. As
``torch.autograd.graph.save_on_cpu`` does, with three differences: the parameters stay where they
are; strides are kept, so that backward runs the same kernels; and the memory is Python's own,
which neither a cap on torch's CPU allocator counts nor a cache of pinned memory keeps for good.
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

from autofit.strategies.activation_offload.saved_tensors import laid_out

HUGE_PAGES = 14
"""Linux's ``MADV_HUGEPAGE``."""
LARGE = 1 << 20
"""Bytes from which memory comes as it is from the system, which a process may ask for so often."""


@dataclass(frozen=True, slots=True)
class _Hosted:
    """A tensor's content in host memory, and what it takes to make the tensor again."""

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
        """Return the tensor, on its device again."""
        there = torch.empty(self.content.shape, dtype=self.content.dtype, device=self.device)
        return there.copy_(self.content).as_strided(self.shape, self.stride)


def _pages(size: int) -> mmap:
    """Return memory in large pages, where the system has them: made a page at a time."""
    if sys.platform != "linux":
        return mmap(-1, size)
    memory = mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)  # shared memory has small pages
    with suppress(OSError):
        memory.madvise(HUGE_PAGES)
    return memory


def copy_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in host memory of Python's own."""
    if not _is_plain(tensor) or not tensor.numel():
        return tensor.to("cpu", copy=True)
    source, stride = laid_out(tensor)
    return _copied(source).as_strided(tensor.shape, stride)


def _copied(source: torch.Tensor) -> torch.Tensor:
    size = source.numel() * source.element_size()
    memory = bytearray(size) if size < LARGE else _pages(size)
    return torch.frombuffer(memory, dtype=source.dtype).copy_(source)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own, laid out by strides."""
    return tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def saved_on_host(parameters: Iterable[torch.Tensor]) -> saved_tensors_hooks:
    """Return a context in which autograd saves everything but ``parameters`` on the host.

    Of sharded parameters what is gathered from all ranks goes there too.
    """
    stay = {each.untyped_storage().data_ptr() for each in parameters if _is_plain(each)}

    def pack(tensor: torch.Tensor) -> Any:
        movable = _is_plain(tensor) and tensor.numel()
        if not movable or tensor.untyped_storage().data_ptr() in stay:
            return tensor
        return _Hosted.of(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        tensor: torch.Tensor = packed.back() if isinstance(packed, _Hosted) else packed
        return tensor

    return saved_tensors_hooks(pack, unpack)
