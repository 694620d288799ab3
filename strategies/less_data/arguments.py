"""Cuts the arguments of a call, for models that compute the loss themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from autofit.exceptions import Refused
from autofit.strategies.base import Forward

Cut = Callable[[list[Any]], list[Any]]
"""Returns the flattened arguments of a call without the omitted data. Raises ``Refused``."""


class Samples(Protocol):
    """Returns how many samples of a batch remain under a level."""

    def samples(self, level: str, batch: int) -> int:
        """Return how many of ``batch`` samples remain."""


def trained_on(call: Forward, cut: Cut) -> Forward:
    """Return ``call`` with its arguments cut, for calls with gradients."""

    def cut_call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        some, named = tree_unflatten(cut(leaves), spec)
        output = call(*some, **named)
        tensors = (each for each in tree_leaves(output) if isinstance(each, torch.Tensor))
        if not any(each.requires_grad and each.dim() == 0 for each in tensors):
            raise Refused("the script computes the loss outside the model, from the whole batch")
        return output

    return cut_call


def samples(leaves: list[Any], of: Samples, level: str) -> list[Any]:
    """Return the arguments of the first samples."""
    sizes = {leaf.shape[0] for leaf in _tensors(leaves) if leaf.shape[0] != 1}
    if len(sizes) != 1:
        reason = "do not all have the same number of" if sizes else "show no"
        raise Refused(f"the model's arguments {reason} samples")
    (size,) = sizes
    left = of.samples(level, size)
    return [
        leaf[:left] if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] > 1 else leaf
        for leaf in leaves
    ]


def tokens(leaves: list[Any]) -> list[Any]:
    """Return the arguments of the first half of the tokens."""
    whole = (
        tensor.shape
        for tensor in _tensors(leaves)
        if tensor.dim() == 2
        and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    )
    shape = next(whole, None)
    if shape is None or shape[1] < 2:
        raise Refused(
            "no argument of the model looks like token ids: whole numbers, a row for each sample"
        )
    return [_shortened(leaf, *shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _shortened(tensor: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Cut each dimension of size ``length``.

    The first dimension is cut only if it cannot be the batch.
    """
    for dim, size in enumerate(tensor.shape):
        if size == length and (dim > 0 or (tensor.dim() == 1 and batch != length)):
            tensor = tensor.narrow(dim, 0, length // 2)
    return tensor


def _tensors(leaves: list[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
