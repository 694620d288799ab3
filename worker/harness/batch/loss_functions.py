"""How the loss functions of torch reduce over the samples of a batch.

Their documentation defines it: a mean over samples or over the labels that count, or a sum
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

CLASS_LOSSES: set[Callable[..., Any]] = {functional.cross_entropy, functional.nll_loss}
"""Losses of scores ``(rows, classes, ...)`` and class indices ``(rows, ...)``."""
DISTANCE_LOSSES: set[Callable[..., Any]] = {
    functional.huber_loss,
    functional.l1_loss,
    functional.mse_loss,
    functional.smooth_l1_loss,
}
"""Losses that are symmetric in two tensors of one shape; some scripts pass the target first."""
ELEMENT_LOSSES: set[Callable[..., Any]] = DISTANCE_LOSSES | {
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.cross_entropy,
    functional.kl_div,
}
"""Losses of two tensors of one shape; cross-entropy then gets class probabilities."""
LOSSES = CLASS_LOSSES | ELEMENT_LOSSES
AVERAGES = ("mean", "batchmean")
_SIGNATURES = {each: inspect.signature(each) for each in LOSSES}


def arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name; raise ``TypeError`` if they do not fit."""
    bound = _SIGNATURES[function].bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the losses of chunks become the loss of the batch."""

    join: Join
    name: str
    """The ``reduction`` argument of the loss function on a chunk."""
    divisor: torch.Tensor | None = None
    """A scalar on the device by which each chunk's loss is divided: the batch's label count."""


def reduction_of(
    function: Callable[..., Any], given: Mapping[str, Any], output: torch.Tensor
) -> Reduction | None:
    """Return how a call of ``function`` reduces over samples; ``None`` if that is not known.

    ``output`` is the function's input; only its shape and data type are used.
    """
    target, weight, reduction = given["target"], given.get("weight"), given["reduction"]
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    if function in CLASS_LOSSES and not target.is_floating_point():
        if target.shape != (*output.shape[:1], *output.shape[2:]):
            return None
        whole = reduction == "mean"
        divisor = (
            _label_count(target, given["ignore_index"], weight, output.dtype) if whole else None
        )
        return Reduction(Join(Rule.SUM), "sum", divisor) if whole or reduction == "sum" else None
    pos_weight = given.get("pos_weight")  # one weight a class, so it needs no dimension for samples
    if target.shape != output.shape or not target.is_floating_point() or weight is not None:
        return None
    if pos_weight is not None and pos_weight.ndim >= output.ndim:
        return None
    if reduction == "sum":
        return Reduction(Join(Rule.SUM), reduction)
    return Reduction(Join(Rule.SAMPLES), reduction) if reduction in AVERAGES else None


def _label_count(
    target: torch.Tensor, ignored: int, weight: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the divisor of a mean over labels: their number, or the sum of their weights."""
    known = target != ignored
    exact = torch.promote_types(dtype, torch.float32)
    if weight is None:
        return known.sum().to(exact)
    return (weight.detach()[target.where(known, 0)] * known).sum().to(exact)
