"""Which operations a selectively checkpointed block keeps: what costs time, and draws nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autofit.strategies.base import Forward

PRODUCTS = ("mm", "addmm", "convolution")
"""Products with weights. Not ``bmm``: attention written by hand has its scores there, which are
many and quickly made again, as Korthikanti et al. do."""
ATTENTION = "_scaled_dot_product_"
"""What the names of the fused kernels begin with."""


@cache
def _costly() -> frozenset[Any]:
    """Return the operations whose results are kept."""
    kernels = [name for name in dir(torch.ops.aten) if name.startswith(ATTENTION)]
    named = [name for name in kernels if not name.endswith("_backward")]
    return frozenset(getattr(torch.ops.aten, name).default for name in (*PRODUCTS, *named))


def _draws(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether attention drops: kept, its draws would be missing when the rest runs again."""
    names = [argument.name for argument in operation._schema.arguments]
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in _costly() and not _draws(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class _Once:
    """Around what runs again: before 2.13 torch does not notice each second time by itself."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self._inner = inner
        self._used = False

    def __enter__(self) -> None:
        if self._used:
            raise RuntimeError(
                "backward for a second time through a region computed under selective activation"
                " checkpoint, whose results are no longer kept"
            )
        self._used = True
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return what forward runs in, and what it runs in again."""
    first, again = create_selective_checkpoint_contexts(_policy)
    return first, _Once(again)


@contextlib.contextmanager
def _casts_anew() -> Iterator[None]:
    """Let autocast keep no casts: when a block runs again it would make more than it had made."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def selectively(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``forward``; in backward all but its costly operations run again."""
    with _casts_anew():
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)


def wrapper(forward: Forward) -> Forward:
    """Run a block's calls with gradients so."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return selectively(forward, *args, **kwargs)

    return call


class Switched:
    """The same as what a Hugging Face model keeps for its checkpointing.

    In a pickle or a copy it is what the model itself would keep: plain checkpointing.
    """

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer."""
        return selectively(forward, *args, **kwargs)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Reduce to plain checkpointing."""
        return partial(checkpoint, use_reentrant=False).__reduce__()
