"""Which operations a selectively checkpointed block keeps: what costs time, and draws nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autofit.strategies.checkpointing.recompute import casts_anew

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


def selectively(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``forward``; in backward all but its costly operations run again."""
    with casts_anew():
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)
