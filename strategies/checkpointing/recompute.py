"""Runs a block that backward recomputes, in a model's own checkpointing or around the block."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from autofit.exceptions import Refused
from autofit.strategies.base import Forward

STATISTICS_CHANGED = (
    "a block ran in evaluation, and its batch statistics changed before its backward"
)


@contextlib.contextmanager
def casts_anew() -> Iterator[None]:
    """Disable autocast's cache of casts in the context.

    Backward repeats the casts of a block. The cache would hold two bytes for each parameter during
    forward.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def plainly(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run ``forward`` under checkpointing: backward runs all of it again."""
    if torch.compiler.is_compiling():  # the compiler manages the casts
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    with casts_anew():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


Modes = list[tuple[nn.Module, bool]]
"""Modules, and whether they are in training mode."""


def wrapper(block: nn.Module) -> Callable[[Forward], Forward]:
    """Return a wrapper that checkpoints the calls of ``block`` that need gradients."""
    reference = weakref.ref(block)

    def wrapped(forward: Forward) -> Forward:
        batches = 0  # counted by the norms

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal batches
            held, graded = reference(), torch.is_grad_enabled()
            if held is None or not (graded or held.training):
                return forward(*args, **kwargs)
            modes = [(each, each.training) for each in held.modules()]
            batches += any(mode and isinstance(each, _NormBase) for each, mode in modes)
            if not graded:
                return forward(*args, **kwargs)
            return plainly(_as_at_first(forward, held, modes, lambda: batches), *args, **kwargs)

        return call

    return wrapped


def _as_at_first(
    forward: Forward, block: nn.Module, modes: Modes, batches: Callable[[], int]
) -> Forward:
    """Return ``forward``, whose second run repeats the first one.

    The second run uses the same ``modes`` and the same contents of lists. Only the first run
    updates batch statistics; outputs of norms in training do not depend on them. ``batches``
    returns how many batches the norms have counted. If a norm ran in evaluation and its statistics
    have changed since, the second run raises ``Refused``.
    """
    lists: dict[int | str, Any] = {}
    evaluates = any(isinstance(each, _NormBase) and not mode for each, mode in modes)
    counted, ran = batches(), False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal ran
        if not ran:
            ran = True
            given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            lists.update({at: copy(each) for at, each in given if type(each) in (list, dict)})
            return forward(*args, **kwargs)
        if evaluates and batches() > counted:
            raise Refused(STATISTICS_CHANGED, "checkpointing")
        # Use the tensors of this call: they may have been offloaded and restored.
        again = [copy(lists[at]) if at in lists else each for at, each in enumerate(args)]
        named = {at: copy(lists[at]) if at in lists else each for at, each in kwargs.items()}
        with _in_modes(modes), _statistics_on_copies(block):
            return forward(*again, **named)

    return call


@contextlib.contextmanager
def _in_modes(modes: Modes) -> Iterator[None]:
    """Return a context with the modules in the given modes."""
    others = [(vars(each), mode) for each, mode in modes if each.training is not mode]
    for held, mode in others:
        held["training"] = mode
    try:
        yield
    finally:
        for held, mode in others:
            held["training"] = not mode


@contextlib.contextmanager
def _statistics_on_copies(block: nn.Module) -> Iterator[None]:
    """Have the norms in ``block`` write their statistics to copies."""
    norms = [each for each in block.modules() if isinstance(each, _NormBase)]
    before = [dict(norm._buffers) for norm in norms]
    copies = [{n: None if b is None else b.clone() for n, b in o.items()} for o in before]
    for norm, buffers in zip(norms, copies, strict=True):
        norm._buffers.update(buffers)
    try:
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)


class Switched:
    """The checkpointing function of a Hugging Face model.

    Pickles and copies contain torch's own function.
    """

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a layer under checkpointing."""
        return plainly(forward, *args, **kwargs)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Return torch's own function."""
        return partial(checkpoint, use_reentrant=False).__reduce__()
