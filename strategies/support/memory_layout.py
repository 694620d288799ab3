"""How a tensor lies in memory."""

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
