"""How a tensor lies in memory, and how much of its device's memory a process may use.

A hook asks this; the rest is asked in ``worker/meter``.
"""

from __future__ import annotations

import torch


def laid_out(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return a tensor's memory in one dimension, and the stride that restores the tensor.

    The stride stays the same, so that backward runs the same kernels. A tensor with gaps between
    its elements is made contiguous first.
    """
    if not gapped(tensor):  # dense in some order, or expanded
        return tensor.as_strided((span(tensor),), (1,)), tensor.stride()
    return tensor.contiguous().view(-1), torch.empty(tensor.shape, device="meta").stride()


def span(tensor: torch.Tensor) -> int:
    """Return the number of elements from a tensor's first to its last in memory."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def gapped(tensor: torch.Tensor) -> bool:
    """Return whether there are gaps between a tensor's elements."""
    return span(tensor) > tensor.numel()


def on_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` is what torch calls the accelerator of this machine."""
    found = torch.accelerator.current_accelerator()
    return found is not None and device.type == found.type


def device_capacity(device: torch.device) -> int | None:
    """Return the bytes that this process may use of an accelerator, ``None`` for other devices."""
    if not on_accelerator(device):
        return None
    module = torch.get_device_module(device)
    total = module.get_device_properties(device).total_memory
    return int(total * module.get_per_process_memory_fraction(device))


def empty_host_cache() -> None:
    """Give pinned host memory that no tensor uses back to the system."""
    public = getattr(torch.accelerator, "empty_host_cache", None)  # from torch 2.12 on
    (public or torch._C._host_emptyCache)()
