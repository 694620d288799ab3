"""How a block is run that runs again in backward: in a model's own checkpointing, or around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from autofit.strategies.base import Forward

Run = Callable[..., Any]
"""Runs a forward, which comes first, with what it is given after it."""


@contextlib.contextmanager
def casts_anew() -> Iterator[None]:
    """Let autocast keep no casts.

    Backward makes those of a block again. Kept, they would be two bytes for each parameter while
    forward runs; and under the selective level fewer would be made again than had been made.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def plainly(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run ``forward``; all of it runs again in backward."""
    if torch.compiler.is_compiling():  # whose casts are the compiler's
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    with casts_anew():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def wrapper(run: Run) -> Callable[[Forward], Forward]:
    """Return what has a block's calls run by ``run``, those with gradients."""

    def wrapped(forward: Forward) -> Forward:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return run(forward, *args, **kwargs)

        return call

    return wrapped


class Switched:
    """The same as what a Hugging Face model keeps for its checkpointing.

    In a pickle or a copy it is what the model itself would keep: plain checkpointing.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a layer."""
        return self._run(forward, *args, **kwargs)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Reduce to plain checkpointing."""
        return partial(checkpoint, use_reentrant=False).__reduce__()
