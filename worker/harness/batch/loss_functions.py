"""How the loss functions of torch add up over the samples of a batch, as they are defined.

Nothing has to be tried: a mean over samples or over the classes that count, or a sum
(https://docs.pytorch.org/docs/stable/nn.functional.html#loss-functions).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from autofit.worker.harness.batch.layout import Join, Rule

OF_CLASSES: set[Callable[..., Any]] = {functional.cross_entropy, functional.nll_loss}
"""Of scores, ``(rows, classes, ...)``, and the number of a class for each row and place."""
OF_DISTANCES: set[Callable[..., Any]] = {
    functional.huber_loss,
    functional.l1_loss,
    functional.mse_loss,
    functional.smooth_l1_loss,
}
"""Of two tensors of one shape, in either order: scripts pass the target first as well."""
OF_ELEMENTS: set[Callable[..., Any]] = OF_DISTANCES | {
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.cross_entropy,
    functional.kl_div,
}
"""Of two tensors of one shape; for cross-entropy the second holds the odds of each class."""
LOSSES = OF_CLASSES | OF_ELEMENTS
MEANS = ("mean", "batchmean")
_SIGNATURES = {each: inspect.signature(each) for each in LOSSES}


def arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by their names; raise ``TypeError`` as the call would."""
    bound = _SIGNATURES[function].bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


@dataclass(frozen=True, slots=True)
class Mean:
    """How the losses of parts become that of the whole."""

    join: Join
    reduction: str
    """Of the function on a part."""
    over: torch.Tensor | None = None
    """A part's loss is divided by it: what counts in the whole batch, a number on the device."""


def mean(
    function: Callable[..., Any], given: Mapping[str, Any], output: torch.Tensor
) -> Mean | None:
    """Return how a call of such a function adds up; ``None`` where that is not known.

    ``output``: its input, of which only shape and kind are looked at.
    """
    target, weight, reduction = given["target"], given.get("weight"), given["reduction"]
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    if function in OF_CLASSES and not target.is_floating_point():
        if target.shape != (*output.shape[:1], *output.shape[2:]):
            return None
        whole = reduction == "mean"
        over = _counted(target, given["ignore_index"], weight, output.dtype) if whole else None
        return Mean(Join(Rule.SUM), "sum", over) if whole or reduction == "sum" else None
    of_all = given.get("pos_weight")  # of each class, so it must not stand for samples
    if target.shape != output.shape or not target.is_floating_point() or weight is not None:
        return None
    if of_all is not None and of_all.ndim >= output.ndim:
        return None
    if reduction == "sum":
        return Mean(Join(Rule.SUM), reduction)
    return Mean(Join(Rule.SAMPLES), reduction) if reduction in MEANS else None


def _counted(
    target: torch.Tensor, ignored: int, weight: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return what a mean over classes divides by: how many count, or their weights."""
    known = target != ignored
    exact = torch.promote_types(dtype, torch.float32)
    if weight is None:
        return known.sum().to(exact)
    return (weight.detach()[target.where(known, 0)] * known).sum().to(exact)
