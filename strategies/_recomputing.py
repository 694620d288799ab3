"""How a block is run that runs again in backward: in a model's own checkpointing, or around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes
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


def wrapper(run: Run, block: nn.Module) -> Callable[[Forward], Forward]:
    """Return what has the calls of ``block`` run by ``run``, those with gradients."""
    norms = [each for each in block.modules() if isinstance(each, _NormBase)]

    def wrapped(forward: Forward) -> Forward:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return run(_counted_once(forward, norms) if norms else forward, *args, **kwargs)

        return call

    return wrapped


def _counted_once(forward: Forward, norms: Sequence[nn.Module]) -> Forward:
    """Return ``forward``, after whose first call ``norms`` write their statistics to copies.

    What they return in training does not depend on the statistics of the batches before.
    """
    counted = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal counted
        if not counted:
            counted = True
            return forward(*args, **kwargs)
        before = [dict(norm._buffers) for norm in norms]
        with _disable_current_modes():  # selective checkpointing expects what forward did, no more
            copies = [{n: None if b is None else b.clone() for n, b in o.items()} for o in before]
        for norm, buffers in zip(norms, copies, strict=True):
            norm._buffers.update(buffers)
        try:
            return forward(*args, **kwargs)
        finally:
            for norm, buffers in zip(norms, before, strict=True):
                norm._buffers.update(buffers)

    return call


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
