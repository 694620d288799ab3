"""Cross-entropy after a linear layer, in chunks of tokens, without storing all logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from autofit.exceptions import Refused
from autofit.strategies.loss.chunks import tokens_in_chunk

TWICE = "the script runs backward twice through the loss, whose gradients are computed once"
CREATED = "the script differentiates gradients (create_graph) through the loss"
HALF = "the loss is scaled after its gradients, which would underflow in float16"

Map = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A linear layer, and the elementwise functions that the model applies to its outputs."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    """Data type of the matrix products: autocast's, or the layer's own."""
    maps: tuple[Map, ...] = ()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits as the model would compute them."""
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(self.dtype)
            logits = linear(hidden.to(self.dtype), self.weight.to(self.dtype), bias)
            return self.mapped(logits)

    def mapped(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits after the model's elementwise functions."""
        for each in self.maps:
            logits = each(logits)
        return logits


def chunked_cross_entropy(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, *, ignore_index: int, mean: bool
) -> torch.Tensor:
    """Return the cross-entropy of ``head(hidden)`` with ``labels``.

    ``hidden`` has the shape ``(tokens, width)``. The result is in float32 or more: the mean over
    labels other than ``ignore_index``, or without ``mean`` their sum. Raises ``Refused`` in
    float16.
    """
    if head.dtype == torch.float16:
        raise Refused(HALF, "loss")
    known = labels != ignore_index
    count = known.sum() if mean else torch.ones((), device=labels.device)
    found: torch.Tensor = _Loss.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, head, labels.where(known, 0), known, count
    )
    return found


class _Loss(torch.autograd.Function):
    """The sum over all tokens, divided by ``count``. Forward also computes the gradients.

    It stores the gradients of ``hidden`` and the weight, and no logits. So no matrix product runs
    twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        head: Head,
        labels: torch.Tensor,
        known: torch.Tensor,
        count: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the chunks one by one."""
        ctx.count = count
        with torch.autocast(hidden.device.type, enabled=False):
            total, ctx.gradients = _through(head, hidden, labels, known, ctx.needs_input_grad[:3])
        return total / count

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        """Scale the gradients by the incoming one."""
        if torch.is_grad_enabled():
            raise Refused(CREATED, "loss")
        if ctx.gradients is None:
            raise Refused(TWICE, "loss")
        gradients, ctx.gradients = ctx.gradients, None
        factor = cotangent / ctx.count.clamp(min=1)  # without a label the gradients are zero
        return *(each.finish(factor) for each in gradients), None, None, None, None


class _Gradient:
    """The gradient of one tensor, summed in float32 or more, or nothing if none is needed."""

    def __init__(self, of: torch.Tensor | None, wanted: bool, dtype: torch.dtype) -> None:
        self._dtype = dtype if of is None else of.dtype
        self.sum = torch.zeros_like(of, dtype=dtype) if wanted and of is not None else None

    def finish(self, factor: torch.Tensor) -> torch.Tensor | None:
        """Return the scaled gradient in the dtype of the tensor."""
        return None if self.sum is None else self.sum.mul_(factor).to(self._dtype)


def _through(
    head: Head,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    known: torch.Tensor,
    wanted: tuple[bool, ...],
) -> tuple[torch.Tensor, list[_Gradient]]:
    """Return the sum of the losses, and the gradients of hidden, weight and bias."""
    exact = torch.promote_types(head.dtype, torch.float32)
    to_hidden = _Gradient(hidden, wanted[0], hidden.dtype)
    to_weight = _Gradient(head.weight, wanted[1], exact)
    to_bias = _Gradient(head.bias, wanted[2], exact)
    weight = head.weight.to(head.dtype)
    bias = None if head.bias is None else head.bias.to(head.dtype)
    total = torch.zeros((), dtype=exact, device=hidden.device)
    step = tokens_in_chunk(len(hidden), len(weight))
    for start in range(0, len(hidden), step):
        rows = slice(start, start + step)
        some = hidden[rows].to(head.dtype)
        logits = linear(some, weight, bias)
        loss, slope = _of_logits(head, logits, labels[rows], known[rows], exact, any(wanted))
        del logits
        total += loss
        if slope is None:
            continue
        if to_hidden.sum is not None:
            to_hidden.sum[rows] = slope @ weight
        if to_weight.sum is not None:
            if slope.dtype == to_weight.sum.dtype:
                to_weight.sum.addmm_(slope.t(), some)
            else:
                to_weight.sum += slope.t() @ some
        if to_bias.sum is not None:
            to_bias.sum += slope.sum(0, dtype=exact)
    return total, [to_hidden, to_weight, to_bias]


def _of_logits(
    head: Head,
    logits: torch.Tensor,
    labels: torch.Tensor,
    known: torch.Tensor,
    exact: torch.dtype,
    wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sum of a chunk's losses, and their gradient to the logits if ``wanted``."""
    curved = wanted and bool(head.maps)
    if curved:
        logits.requires_grad_()
        with torch.enable_grad():
            mapped = head.mapped(logits)
    else:
        mapped = head.mapped(logits)
    scores = torch.log_softmax(mapped.detach(), dim=-1, dtype=exact)
    classes = labels.unsqueeze(1)
    loss = scores.gather(1, classes).squeeze(1).neg_().where(known, 0).sum()
    if not wanted:
        return loss, None
    slope = scores.exp_()  # the softmax, less one for the label
    slope.scatter_(1, classes, slope.gather(1, classes) - 1)
    slope *= known.unsqueeze(1)
    if not curved:
        return loss, slope.to(logits.dtype)
    (found,) = torch.autograd.grad(mapped, logits, slope.to(mapped.dtype))
    return loss, found
