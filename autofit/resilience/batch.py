"""Splits a step's batch into parts, and joins what the step returns for each. Imports torch.

Calls of a model under a plan are split and joined by the same code (``harness.batch.layout``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from autofit.exceptions import Refused, UsageError
from autofit.worker.harness.batch.layout import Batch, Cut, Join, Layout, Rule, joined

Weight = Callable[[Any], float]
"""Returns the weight of a part in a mean loss, such as its number of tokens."""


class StepBatch:
    """The batch of a step; its tensors with more than ``dim`` dimensions hold the samples."""

    def __init__(self, value: Any, dim: int) -> None:
        """Flatten a batch; raise ``UsageError`` if its tensors differ in the number of samples."""
        self._batch = Batch.of((value,), {})
        self.leaves = self._batch.leaves
        tensors = ((i, x) for i, x in enumerate(self.leaves) if isinstance(x, torch.Tensor))
        self._layout = Layout(dim, tuple(i for i, tensor in tensors if tensor.ndim > dim), ())
        sizes = {self.leaves[index].shape[dim] for index in self._layout.batched}
        if len(sizes) > 1:
            raise UsageError(
                f"the tensors of the batch have {', '.join(map(str, sorted(sizes)))} samples in"
                f" dimension {dim}: give them the same number, or name the dimension with dim="
            )
        self.samples = next(iter(sizes), 1)
        """The number of samples; 1 if no tensor holds samples."""

    def take(self, cut: Cut) -> Any:
        """Return the samples of ``cut``; for the whole batch, the tensors themselves."""
        whole = cut == (0, self.samples)
        leaves = self.leaves if whole else self._layout.select(self._batch, cut)
        return self._batch.call(leaves)[0][0]


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
    join = _rule(column, cuts, dim)
    if join.rule is Rule.SUM:
        weights = [1.0] * len(column)
    try:
        return joined(join, column, cuts, weights)
    except Refused as refusal:
        raise UsageError(
            f"the step returned {type(column[0]).__name__} values that differ between the parts of"
            " a batch and cannot be joined: return numbers or tensors with a row for each sample,"
            " or give join="
        ) from refusal


def _rule(column: Sequence[Any], cuts: Sequence[Cut], dim: int) -> Join:
    first = column[0]
    if isinstance(first, torch.Tensor):
        rows = [part.shape[dim] if part.ndim > dim else None for part in column]
        if rows == [stop - start for start, stop in cuts]:
            return Join(Rule.CONCATENATE, dim)
        if first.is_floating_point() and len({part.shape for part in column}) == 1:
            return Join(Rule.SAMPLES)
        if first.dtype is not torch.bool and first.ndim == 0:
            return Join(Rule.SUM)
    elif isinstance(first, float):
        return Join(Rule.SAMPLES)
    elif isinstance(first, int) and not isinstance(first, bool):
        return Join(Rule.SUM)
    return Join(Rule.SAME)
