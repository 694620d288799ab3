"""What the last bits of weights and samples make of a model's gradients, and weights of zero.

A model that makes much of so small a difference makes as much of another order of sums: a ReLU in a
million changes sides for it, which is a thousandth of a gradient.

What weights of zero switch off shows in nothing: a residual branch that begins as nothing, a last
layer that answers every sample alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autofit.worker.harness.digest import pattern
from autofit.worker.harness.sharded import is_sharded

Rounded = Callable[[torch.Tensor], torch.Tensor]
"""Returns values as they are in less, or a little off."""
ORDER = 0.02
"""The most that the order of float32's sums may make, however a model enlarges it.

Where products are in TF32 a last bit decides what some of them are rounded to, a thousandth away:
then it is what any lower precision may make.
"""
ORDER_IN_HALF = 0.2
"""The same of half precision's sums: 22 blocks in bf16 make 0.08 to 0.13 of an adapter's gradient,
where the last bits of weights make 0.2; one of two samples that counts half as much again, 0.37."""
SINGLE = 16
"""As many inputs a gate of zero is taken to have: it becomes a quarter at most."""


@contextmanager
def weights_rounded(
    parameters: Iterable[torch.Tensor], rounded: Rounded, *, halves: bool = False
) -> Iterator[None]:
    """Within it float32 parameters are ``rounded``; autograd notices nothing.

    ``halves``: those in half precision too.
    """
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if halves else (torch.float32,)
    chosen = [each.data for each in parameters if each.dtype in dtypes]
    kept = [each.to("cpu", copy=True) for each in chosen]
    try:
        for each in chosen:
            each.copy_(rounded(each))
        yield
    finally:
        for each, values in zip(chosen, kept, strict=True):
            each.copy_(values)


@contextmanager
def stirred(module: nn.Module) -> Iterator[bool]:
    """Within it weights that are all zero are not; gives whether any are.

    Biases stay zero: they switch nothing off, and what they add to every sample makes samples more
    alike with each layer. Autograd notices nothing.
    """
    still = [] if is_sharded(module) else _still(module)
    try:
        for each in still:
            fan_in = each[0].numel() if each.ndim > 1 else SINGLE
            each.copy_(pattern(each, 0, 0).div_(fan_in**0.5))
        yield bool(still)
    finally:
        for each in still:
            each.zero_()


def _still(module: nn.Module) -> list[torch.Tensor]:
    plain = [
        each.data
        for name, each in module.named_parameters()
        if "bias" not in name.rpartition(".")[2]
        if type(each) is nn.Parameter and each.requires_grad and each.numel() and _apart(each)
    ]
    if not plain:
        return []
    largest = torch._foreach_norm(plain, torch.inf)
    return [each for each, most in zip(plain, largest, strict=True) if not float(most)]


def _apart(parameter: torch.Tensor) -> bool:
    """Return whether each of its numbers lies in a place of its own, as far as is seen."""
    return parameter.layout is torch.strided and 0 not in parameter.stride()


def if_wide(leaf: Any, rounded: Rounded) -> Any:
    """Return a float32 tensor rounded; anything else as it is."""
    if not isinstance(leaf, torch.Tensor) or leaf.dtype is not torch.float32:
        return leaf
    return rounded(leaf.detach()).requires_grad_(leaf.requires_grad)


def to_bf16(values: torch.Tensor) -> torch.Tensor:
    """Return what bf16 holds of float32 values, in float32 again."""
    return values.bfloat16().float()


def nudged(values: torch.Tensor, by: float = 2.0**-22) -> torch.Tensor:
    """Return values each off by a part of it, up or down; by default two last bits of float32."""
    signs = pattern(values, 0, 0).sign_() if values.ndim else torch.ones_like(values)
    return values * signs.mul_(by).add_(1.0)


def nudged_in_half(values: torch.Tensor) -> torch.Tensor:
    """Return values each off by half a last bit of bf16, up or down: a whole one if in bf16."""
    return nudged(values, max(2.0**-9, torch.finfo(values.dtype).eps))
