"""Converts images to the channels-last memory format."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from autofit.strategies.base import Forward

CONVOLUTIONS: dict[int, tuple[type[nn.Module], ...]] = {
    4: (nn.Conv2d, nn.ConvTranspose2d),
    5: (nn.Conv3d, nn.ConvTranspose3d),
}
"""Number of dimensions of a batch to its convolution classes."""
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Number of dimensions to the memory format."""


def convolutions(model: nn.Module) -> dict[int, int]:
    """Return the number of convolutions in ``model`` by the dimensions of a batch."""
    modules = list(model.modules())
    return {
        ndim: sum(isinstance(each, kinds) for each in modules)
        for ndim, kinds in CONVOLUTIONS.items()
    }


def around(forward: Forward, ndims: Collection[int], training: Callable[[], bool]) -> Forward:
    """Return ``forward`` with images of ``ndims`` dimensions in channels-last format.

    Only direct arguments are converted; a list that the script passes stays as it is. Output images
    are converted back to the default format. ``training``: whether the model is in training mode.
    Chunks of a split batch may run without a graph.
    """

    def picture(leaf: Any) -> bool:
        plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided
        return plain and leaf.ndim in ndims and leaf.is_floating_point()

    def last(leaf: Any) -> Any:
        if not picture(leaf):
            return leaf
        form = LAST[leaf.ndim]
        if leaf.is_contiguous() and leaf.is_contiguous(memory_format=form):
            return leaf.clone(memory_format=form)  # one channel or pixel: only strides differ
        return leaf.contiguous(memory_format=form)

    def turned(leaf: Any) -> bool:
        if not picture(leaf) or leaf.is_contiguous():
            return False
        return bool(leaf.is_contiguous(memory_format=LAST[leaf.ndim]))

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() and not training():
            return forward(*args, **kwargs)
        output = forward(*map(last, args), **{name: last(each) for name, each in kwargs.items()})
        if not any(map(turned, tree_leaves(output))):
            return output
        return tree_map(lambda leaf: leaf.contiguous() if turned(leaf) else leaf, output)

    return call
