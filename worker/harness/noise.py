"""What the last bits of weights and samples make of a model's gradients.

A model that makes much of so small a difference makes as much of another order of sums: a ReLU in a
million changes sides for it, which is a thousandth of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autofit.worker.harness.digest import pattern

Rounded = Callable[[torch.Tensor], torch.Tensor]
"""Returns float32 values as they are in less, or a little off."""
ORDER = 0.02
"""The most that the order of float32's sums may make, however a model enlarges it.

Where products are in TF32 a last bit decides what some of them are rounded to, a thousandth away:
then it is what any lower precision may make.
"""


@contextmanager
def weights_rounded(parameters: Iterable[torch.Tensor], rounded: Rounded) -> Iterator[None]:
    """Within it float32 parameters are ``rounded``; autograd notices nothing."""
    wide = [each.data for each in parameters if each.dtype is torch.float32]
    kept = [each.to("cpu", copy=True) for each in wide]
    try:
        for each in wide:
            each.copy_(rounded(each))
        yield
    finally:
        for each, values in zip(wide, kept, strict=True):
            each.copy_(values)


def if_wide(leaf: Any, rounded: Rounded) -> Any:
    """Return a float32 tensor rounded; anything else as it is."""
    if not isinstance(leaf, torch.Tensor) or leaf.dtype is not torch.float32:
        return leaf
    return rounded(leaf.detach()).requires_grad_(leaf.requires_grad)


def to_bf16(values: torch.Tensor) -> torch.Tensor:
    """Return what bf16 holds of float32 values, in float32 again."""
    return values.bfloat16().float()


def nudged(values: torch.Tensor) -> torch.Tensor:
    """Return float32 values each off by a part in four million, up or down: about two last bits."""
    signs = pattern(values, 0, 0).sign_() if values.ndim else torch.ones_like(values)
    return values * signs.mul_(2.0**-22).add_(1.0)
