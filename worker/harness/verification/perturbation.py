"""A model at other weights than its own: rounded, where all is zero zeros_perturbed, or far away.

Weights rounded to bf16 tell what any lower precision may make of the gradients. What weights of
zero switch off shows in nothing: a residual branch that begins as nothing, a last layer that
answers every sample alike. What holds at the present weights alone shows at others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from autofit.worker.harness.torch_state.host_saved import copy_on_host
from autofit.worker.harness.torch_state.modules import is_sharded
from autofit.worker.harness.verification.gradient_digest import pattern

FURTHER = 4.0
"""Times as large that weights are at another point: answers lie further apart there."""
SLIGHTLY = 0.05
"""What is added to biases and norms at most: as much as a few hundred steps may make of them."""
NUDGE = 2.0**-50
"""Relative change of a weight in float64 that is no more than rounding makes."""
SINGLE = 16
"""As many inputs a gate of zero is taken to have: it becomes a quarter at most."""


@contextmanager
def weights_rounded(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within it float32 parameters hold what bf16 holds of them; autograd notices nothing."""
    chosen = [each.data for each in parameters if each.dtype is torch.float32]
    with _others(chosen, _round):
        yield


@contextmanager
def _others(chosen: list[torch.Tensor], change: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Within it tensors are changed, in place: there may be no room for a copy beside them."""
    kept = [copy_on_host(each) for each in chosen]
    try:
        for each in chosen:
            change(each)
        yield
    finally:
        for each, values in zip(chosen, kept, strict=True):
            each.copy_(values)


@contextmanager
def zeros_perturbed(module: nn.Module) -> Iterator[bool]:
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


@contextmanager
def vectors_perturbed(module: nn.Module) -> Iterator[None]:
    """Within it biases and the weights of norms are a little off; autograd notices nothing.

    Most begin as 0 or 1: what a LayerNorm returns has a mean of 0 then, whatever a plan makes of
    it. Not of a sharded module.
    """
    vectors = [] if is_sharded(module) else [e.data for e in _plain(module) if e.ndim < 2]
    with _others(vectors, _shift):
        yield


def _shift(values: torch.Tensor) -> None:
    values.add_(pattern(values, 0, 0), alpha=SLIGHTLY)


@contextmanager
def last_bits_perturbed(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within it float64 weights differ in their last bits; autograd notices nothing."""
    with _others([each.data for each in weights], _nudge):
        yield


def _nudge(values: torch.Tensor) -> None:
    values.addcmul_(values, pattern(values, 0, 0), value=NUDGE)


@contextmanager
def at_other_weights(module: nn.Module, *, larger: bool = True) -> Iterator[None]:
    """Within it the weights are those of another point, far from where they are.

    What holds at one point alone shows: a maximum that the same sample wins in every part, an
    absolute value whose sign is everywhere the same. Autograd notices nothing. Not ``larger``: the
    signs alone are others.
    """
    chosen = [] if is_sharded(module) else [each.data for each in _plain(module)]
    with _others(chosen, partial(_move, larger=larger)):
        yield


def _move(values: torch.Tensor, *, larger: bool) -> None:
    """Change the signs of rows and columns, and make them larger by different factors.

    What has no rows, a bias say, is a little off.
    """
    if values.ndim < 2:
        size = values.norm() / max(1, values.numel()) ** 0.5
        values.add_(pattern(values, 0, 0).mul_(0.5 * size + 0.1))
        return
    for axis, size in enumerate(values.shape):
        places = torch.arange(size, dtype=torch.float64)
        waves = torch.sin(2.0 + axis + 2.4 * places)  # of signs that follow no short period
        factors = waves.sign() * (1.0 + waves.square() if larger else 1.0)
        shape = [size if each == axis else 1 for each in range(values.ndim)]
        values.mul_(factors.to(values).view(shape))
    if larger:
        values.mul_(FURTHER)


def _plain(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of fractions that have memory of their own."""
    return [
        each
        for each in module.parameters()
        if type(each) is nn.Parameter and each.numel() and _apart(each) and each.is_floating_point()
    ]


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


def rounded(leaf: Any) -> Any:
    """Return what bf16 holds of a float32 tensor, in float32 again; anything else as it is."""
    if not isinstance(leaf, torch.Tensor) or leaf.dtype is not torch.float32:
        return leaf
    return _to_bf16(leaf.detach()).requires_grad_(leaf.requires_grad)


def _round(values: torch.Tensor) -> None:
    values.copy_(_to_bf16(values))


def _to_bf16(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()
