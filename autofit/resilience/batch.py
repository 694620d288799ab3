"""A batch in parts, and what a step returns for each of them in one piece again. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autofit.exceptions import UsageError

Cut = tuple[int, int]
"""A range of samples: the first, and the one after the last."""

Weight = Callable[[Any], float]
"""How much a part of the batch counts in a mean loss, in tokens, say."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch, flattened: tensors of at least ``dim + 1`` dimensions carry the samples."""

    leaves: list[Any]
    spec: TreeSpec
    dim: int

    @classmethod
    def of(cls, value: Any, dim: int) -> Batch:
        """Flatten a batch; raise ``UsageError`` where its tensors differ in their samples."""
        batch = cls(*tree_flatten(value), dim)
        sizes = {leaf.shape[dim] for leaf in batch.leaves if batch._carries(leaf)}
        if len(sizes) > 1:
            raise UsageError(
                f"the tensors of the batch have {', '.join(map(str, sorted(sizes)))} samples in"
                f" dimension {dim}: give them as many, or name the dimension with dim="
            )
        return batch

    def _carries(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.ndim > self.dim

    @property
    def samples(self) -> int:
        """How many; 1 where no tensor shows it."""
        carriers = (leaf for leaf in self.leaves if self._carries(leaf))
        first = next(carriers, None)
        return 1 if first is None else int(first.shape[self.dim])

    def take(self, cut: Cut) -> Any:
        """Return some samples, as views; the whole batch as it came."""
        if cut == (0, self.samples):
            return tree_unflatten(self.leaves, self.spec)
        leaves = [
            leaf.narrow(self.dim, cut[0], cut[1] - cut[0]) if self._carries(leaf) else leaf
            for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.spec)


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss in what a step returned: itself, its first, or what is called ``loss``."""
    found = output
    if isinstance(output, dict):
        found = output.get("loss")
    elif isinstance(output, (tuple, list)) and output:
        found = output[0]
    elif not isinstance(output, torch.Tensor):
        found = getattr(output, "loss", None)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise UsageError(
            "a step must return its loss, a tensor with one element: alone, first of a tuple, or"
            f" under the name loss; this one returned {type(output).__name__}"
        )
    return found


def detached(output: Any) -> Any:
    """Return the output without its graph."""
    leaves, spec = tree_flatten(output)
    return tree_unflatten(
        [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
    )


def joined(outputs: Sequence[Any], cuts: Sequence[Cut], weights: Sequence[float], dim: int) -> Any:
    """Return one output for the outputs of the parts.

    Tensors with a row a sample are concatenated; other floating-point numbers, the loss first of
    all, are added up with the parts' weights; whole numbers are counts, and added up; the rest must
    be the same for every part (``UsageError`` if not).
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [tree_flatten(output) for output in outputs]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    leaves = [_joined(column, cuts, weights, dim) for column in columns]
    return tree_unflatten(leaves, flat[0][1])


def _joined(column: Sequence[Any], cuts: Sequence[Cut], weights: Sequence[float], dim: int) -> Any:
    first = column[0]
    if isinstance(first, torch.Tensor):
        rows = [part.shape[dim] if part.ndim > dim else None for part in column]
        if rows == [stop - start for start, stop in cuts]:
            return torch.cat(list(column), dim=dim)
        if first.is_floating_point() and len({part.shape for part in column}) == 1:
            pairs = zip(column, weights, strict=True)
            return sum(part * weight for part, weight in pairs if weight)
        if first.dtype is not torch.bool and first.ndim == 0:
            return sum(column)
    elif isinstance(first, float):
        return sum(part * weight for part, weight in zip(column, weights, strict=True) if weight)
    elif isinstance(first, int) and not isinstance(first, bool):
        return sum(column)
    elif all(part == first for part in column):
        return first
    raise UsageError(
        f"the step returned {type(first).__name__} values that differ between the parts of a batch"
        " and cannot be put together: return tensors with a row a sample, numbers, or give join="
    )
