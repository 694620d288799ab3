"""Splits a batch into parts, and joins what a step returns for each part. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autofit.exceptions import UsageError

Cut = tuple[int, int]
"""A range of samples, ``(start, stop)``; ``stop`` is excluded."""

Weight = Callable[[Any], float]
"""Returns the weight of a part in a mean loss, such as its number of tokens."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A flattened batch; its tensors with more than ``dim`` dimensions hold the samples."""

    leaves: list[Any]
    spec: TreeSpec
    dim: int

    @classmethod
    def of(cls, value: Any, dim: int) -> StepBatch:
        """Flatten a batch; raise ``UsageError`` if its tensors differ in the number of samples."""
        batch = cls(*tree_flatten(value), dim)
        sizes = {leaf.shape[dim] for leaf in batch.leaves if batch._carries(leaf)}
        if len(sizes) > 1:
            raise UsageError(
                f"the tensors of the batch have {', '.join(map(str, sorted(sizes)))} samples in"
                f" dimension {dim}: give them the same number, or name the dimension with dim="
            )
        return batch

    def _carries(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.ndim > self.dim

    @property
    def samples(self) -> int:
        """The number of samples; 1 if no tensor holds samples."""
        carriers = (leaf for leaf in self.leaves if self._carries(leaf))
        first = next(carriers, None)
        return 1 if first is None else int(first.shape[self.dim])

    def take(self, cut: Cut) -> Any:
        """Return the samples of ``cut`` as views; for the whole batch, the tensors themselves."""
        if cut == (0, self.samples):
            return tree_unflatten(self.leaves, self.spec)
        leaves = [
            leaf.narrow(self.dim, cut[0], cut[1] - cut[0]) if self._carries(leaf) else leaf
            for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.spec)


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss of a step: its output, the first element, or the item ``loss``.

    Raises ``UsageError`` if that is no tensor with one element.
    """
    found = output
    if isinstance(output, dict):
        found = output.get("loss")
    elif isinstance(output, (tuple, list)) and output:
        found = output[0]
    elif not isinstance(output, torch.Tensor):
        found = getattr(output, "loss", None)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise UsageError(
            "a step must return its loss, a tensor with one element: alone, first in a tuple, or"
            f" under the name loss; this step returned {type(output).__name__}"
        )
    return found


def detached(output: Any) -> Any:
    """Return the output with its tensors detached from the graph."""
    leaves, spec = tree_flatten(output)
    return tree_unflatten(
        [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
    )


def join_outputs(
    outputs: Sequence[Any], cuts: Sequence[Cut], weights: Sequence[float], dim: int
) -> Any:
    """Return one output for the outputs of all parts.

    Tensors with a row for each sample are concatenated. Other floating-point values, such as the
    loss, are summed with the weights of the parts. Integers are counts, and are summed. All other
    values must be equal in every part, else ``UsageError`` is raised.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [tree_flatten(output) for output in outputs]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    leaves = [_join_column(column, cuts, weights, dim) for column in columns]
    return tree_unflatten(leaves, flat[0][1])


def _join_column(
    column: Sequence[Any], cuts: Sequence[Cut], weights: Sequence[float], dim: int
) -> Any:
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
        " and cannot be joined: return numbers or tensors with a row for each sample, or give join="
    )
