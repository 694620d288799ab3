"""Lays pictures out in memory with the channels of a pixel side by side."""

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
"""Dimensions of what they take, of a batch."""
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Dimensions to the layout."""


def convolutions(model: nn.Module) -> dict[int, int]:
    """Return how many convolutions of pictures ``model`` has, by the dimensions of a batch."""
    modules = list(model.modules())
    return {
        ndim: sum(isinstance(each, kinds) for each in modules)
        for ndim, kinds in CONVOLUTIONS.items()
    }


def around(forward: Forward, ndims: Collection[int], training: Callable[[], bool]) -> Forward:
    """Return ``forward`` with pictures of ``ndims`` dimensions laid out so, while it trains.

    Of its arguments those that are pictures themselves: a list that it is given stays the script's.
    Pictures that come out are laid out as they are where nobody has asked for anything.
    ``training``: whether the model is in training mode; parts of a split batch run without a graph.
    """

    def picture(leaf: Any) -> bool:
        plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided
        return plain and leaf.ndim in ndims and leaf.is_floating_point()

    def last(leaf: Any) -> Any:
        if not picture(leaf):
            return leaf
        form = LAST[leaf.ndim]
        if leaf.is_contiguous() and leaf.is_contiguous(memory_format=form):
            return leaf.clone(memory_format=form)  # one channel or one pixel: only strides tell
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
