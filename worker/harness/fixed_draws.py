"""Runs a model in training mode with its random draws replaced by fixed ones.

So that one forward of a batch and several of its parts can be compared: dropout keeps everything,
other draws give the same value for every sample. What cannot be seen from Python (a fused kernel
with its own generator) still draws; the probe notices by the generators' state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

F = nn.functional


def _identity(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return input


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, *args, **kwargs)


def _like_half(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    kwargs.pop("generator", None)
    kwargs.pop("memory_format", None)
    return torch.full_like(input, 0.5, **kwargs)


def _fill(value: float) -> Callable[..., torch.Tensor]:
    def fill(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return input.fill_(value)

    return fill


def _half(*size: Any, **kwargs: Any) -> torch.Tensor:
    kwargs.pop("generator", None)
    shape = kwargs.pop("size", None) or (
        size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    )
    return torch.full(tuple(shape), 0.5, **kwargs)


_FIXED: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _identity,
    F.dropout1d: _identity,
    F.dropout2d: _identity,
    F.dropout3d: _identity,
    F.alpha_dropout: _identity,
    F.feature_alpha_dropout: _identity,
    torch.dropout: _identity,
    torch.dropout_: _identity,
    torch.feature_dropout: _identity,
    torch.alpha_dropout: _identity,
    torch.rand_like: _like_half,
    torch.randn_like: _like_half,
    torch.rand: _half,
    torch.randn: _half,
    torch.Tensor.bernoulli_: _fill(1.0),
    torch.Tensor.uniform_: _fill(0.5),
    torch.Tensor.normal_: _fill(0.5),
    torch.bernoulli: lambda input, *args, **kwargs: torch.ones_like(input),
}


class FixedDraws(TorchFunctionMode):
    """Replaces the functions that draw."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _FIXED.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def fixed_draws(module: nn.Module) -> Iterator[None]:
    """Within it, forwards of ``module`` draw nothing that Python can see."""
    recurrent = [each for each in module.modules() if isinstance(each, nn.RNNBase)]
    rates = [each.dropout for each in recurrent]
    for each in recurrent:
        each.dropout = 0.0  # drawn inside the fused recurrent kernel
    try:
        with FixedDraws():
            yield
    finally:
        for each, rate in zip(recurrent, rates, strict=True):
            each.dropout = rate
