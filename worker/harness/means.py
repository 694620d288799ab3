"""How the loss functions of torch add up over the samples of a batch, as they are defined.

Nothing has to be tried: a mean over samples, over the labels that count, or a sum
(https://docs.pytorch.org/docs/stable/nn.functional.html#loss-functions).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from autofit.worker.harness.joining import Join, Labels, Rule

OF_CLASSES: set[Callable[..., Any]] = {functional.cross_entropy, functional.nll_loss}
"""Of scores, ``(rows, classes, ...)``, and the number of a class for each row and place."""
OF_ELEMENTS: set[Callable[..., Any]] = {
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.cross_entropy,
    functional.huber_loss,
    functional.kl_div,
    functional.l1_loss,
    functional.mse_loss,
    functional.smooth_l1_loss,
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


def rule(
    function: Callable[..., Any], given: Mapping[str, Any], shape: torch.Size, leaf: int
) -> Join | None:
    """Return how the losses of parts become that of the whole; ``None`` where that is not known.

    ``shape``: of its input; ``leaf``: where its target is among the arguments of the parts.
    """
    target, weight = given["target"], given.get("weight")
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    classes = not target.is_floating_point()
    if function in OF_CLASSES and classes:
        if target.shape != (*shape[:1], *shape[2:]):
            return None
        mean = Join(Rule.TOKENS, labels=Labels(leaf, given["ignore_index"], weights=weight))
    else:
        of_all = given.get("pos_weight")  # of each class, so it must not stand for samples
        if classes or target.shape != shape or weight is not None:
            return None
        if of_all is not None and of_all.ndim >= len(shape):
            return None
        mean = Join(Rule.SAMPLES)
    reduction = given["reduction"]
    return mean if reduction in MEANS else Join(Rule.SUM) if reduction == "sum" else None
