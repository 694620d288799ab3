"""Runs a model with changed weights: rounded, nonzero where they are zero, or far away.

Weights rounded to bf16 show how much any lower precision may change the gradients. Weights of zero
hide a part of the model: a residual branch that starts as nothing, or a last layer that returns the
same for every sample. What holds only at the present weights fails at others.
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
"""The factor by which other weights are larger, so that outputs differ more."""
SLIGHTLY = 0.05
"""The largest change of biases and norms: as much as a few hundred steps make."""
GATE_INPUTS = 16
"""The assumed number of inputs of a gate of zero; the gate becomes at most a quarter."""


@contextmanager
def weights_rounded(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Round float32 parameters to bf16 within the context. Autograd does not notice."""
    chosen = [each.data for each in parameters if each.dtype is torch.float32]
    with _changed_in_place(chosen, _round):
        yield


@contextmanager
def _changed_in_place(
    chosen: list[torch.Tensor], change: Callable[[torch.Tensor], None]
) -> Iterator[None]:
    """Change tensors in place within the context, because a copy on the device may not fit."""
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
    """Replace weights that are all zero within the context; yields whether there are any.

    Biases stay zero. They hide nothing, and a common bias would make the samples more alike with
    each layer. Autograd does not notice the change.
    """
    zeros = [] if is_sharded(module) else _zero_weights(module)
    try:
        for each in zeros:
            fan_in = each[0].numel() if each.ndim > 1 else GATE_INPUTS
            each.copy_(pattern(each, 0, 0).div_(fan_in**0.5))
        yield bool(zeros)
    finally:
        for each in zeros:
            each.zero_()


@contextmanager
def vectors_perturbed(module: nn.Module) -> Iterator[None]:
    """Change biases and the weights of norms a little within the context. Autograd does not notice.

    Most of them start as 0 or 1, and the mean of a LayerNorm's output is then 0 whatever a plan
    does. A sharded module stays as it is.
    """
    vectors = [] if is_sharded(module) else [e.data for e in _perturbable(module) if e.ndim < 2]
    with _changed_in_place(vectors, _shift):
        yield


def _shift(values: torch.Tensor) -> None:
    values.add_(pattern(values, 0, 0), alpha=SLIGHTLY)


@contextmanager
def last_bits_perturbed(weights: Iterable[torch.Tensor], size: float) -> Iterator[None]:
    """Change weights by a fraction of at most ``size`` within the context.

    Autograd does not notice.
    """
    with _changed_in_place([each.data for each in weights], partial(_nudge, size=size)):
        yield


def _nudge(values: torch.Tensor, *, size: float) -> None:
    values.addcmul_(values, pattern(values, 0, 0), value=size)


@contextmanager
def at_other_weights(module: nn.Module, *, larger: bool = True) -> Iterator[None]:
    """Give the module other weights, far from its own, within the context.

    What holds only at one point fails there: a maximum at the same sample in every chunk, or an
    absolute value with the same sign everywhere. Autograd does not notice. Without ``larger``, only
    the signs change.
    """
    chosen = [] if is_sharded(module) else [each.data for each in _perturbable(module)]
    matrices, others = _scalable(chosen)
    with _changed_in_place(others, partial(_move, larger=larger)), _scaled(matrices, larger):
        yield


def _scalable(chosen: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the matrices that stay finite when ``_factors`` multiply them, and the others."""
    largest = torch._foreach_norm(chosen, torch.inf) if chosen else []
    matrices: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for values, most in zip(chosen, largest, strict=True):
        finite = float(most) * FURTHER * 2.0**values.ndim <= torch.finfo(values.dtype).max
        (matrices if values.ndim > 1 and finite else others).append(values)
    return matrices, others


def _move(values: torch.Tensor, *, larger: bool) -> None:
    """Multiply a matrix by ``_factors``; change a tensor without rows, such as a bias, a little."""
    if values.ndim < 2:
        size = values.norm() / max(1, values.numel()) ** 0.5
        values.add_(pattern(values, 0, 0).mul_(0.5 * size + 0.1))
        return
    for factors in _factors(values, larger):
        values.mul_(factors)


@contextmanager
def _scaled(matrices: list[torch.Tensor], larger: bool) -> Iterator[None]:
    """Multiply matrices by ``_factors`` within the context.

    A division restores them exactly. A copy of all weights on the host would cost a large model
    seconds.
    """
    done: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for values in matrices:
            for factors in _factors(values, larger):
                values.mul_(factors)
                done.append((values, factors))
        yield
    finally:
        for values, factors in reversed(done):
            values.div_(factors)


def _factors(values: torch.Tensor, larger: bool) -> Iterator[torch.Tensor]:
    """Yield the factors of rows, of columns and so on: signed powers of two, which lose no bit."""
    for axis, size in enumerate(values.shape):
        places = torch.arange(size, dtype=torch.float64)
        waves = torch.sin(2.0 + axis + 2.4 * places)  # signs without a short period
        factors = waves.sign()
        if larger:
            factors *= torch.where(waves.square() > 0.5, 2.0, 1.0) * (1.0 if axis else FURTHER)
        shape = [size if each == axis else 1 for each in range(values.ndim)]
        yield factors.to(values).view(shape)


def _perturbable(module: nn.Module) -> list[nn.Parameter]:
    """Return the floating-point parameters that own their memory."""
    return [
        each
        for each in module.parameters()
        if type(each) is nn.Parameter
        and each.numel()
        and _has_own_entries(each)
        and each.is_floating_point()
    ]


def _zero_weights(module: nn.Module) -> list[torch.Tensor]:
    plain = [
        each.data
        for name, each in module.named_parameters()
        if "bias" not in name.rpartition(".")[2]
        if type(each) is nn.Parameter
        and each.requires_grad
        and each.numel()
        and _has_own_entries(each)
    ]
    if not plain:
        return []
    largest = torch._foreach_norm(plain, torch.inf)
    return [each for each, most in zip(plain, largest, strict=True) if not float(most)]


def _has_own_entries(parameter: torch.Tensor) -> bool:
    """Return whether each entry has its own address, as far as the strides show."""
    return parameter.layout is torch.strided and 0 not in parameter.stride()


def rounded(leaf: Any) -> Any:
    """Return a float32 tensor rounded to bf16; anything else as it is."""
    if not isinstance(leaf, torch.Tensor) or leaf.dtype is not torch.float32:
        return leaf
    return _to_bf16(leaf.detach()).requires_grad_(leaf.requires_grad)


def _round(values: torch.Tensor) -> None:
    values.copy_(_to_bf16(values))


def _to_bf16(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()
