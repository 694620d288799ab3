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
from autofit.strategies.support.draws import Draws

STATISTICS_CHANGED = (
    "a block ran in evaluation, and its batch statistics changed before its backward"
)
BEGAN_TO_CHANGE = "a block changes its buffer {} now, which its first call did not do"


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
        return checkpoint(_drawing_again(forward), *args, use_reentrant=False, **kwargs)


def _drawing_again(forward: Forward) -> Forward:
    """Return ``forward``, whose second run draws the first one's numbers of Python and NumPy.

    torch itself repeats what its own generators have drawn.
    """
    first: Draws | None = None
    ran = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal first, ran
        if not ran:
            ran, before = True, Draws.now()
            output = forward(*args, **kwargs)
            first = before if Draws.now() != before else None
            return output
        if first is None:
            return forward(*args, **kwargs)
        now = Draws.now()
        first.restore()
        try:
            return forward(*args, **kwargs)
        finally:
            now.restore()

    return call


Modes = list[tuple[nn.Module, bool]]
"""Modules, and whether they are in training mode."""


def wrapper(block: nn.Module) -> Callable[[Forward], Forward]:
    """Return a wrapper that checkpoints the calls of ``block`` that need gradients."""
    reference = weakref.ref(block)
    written = _Written()

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
            again = _as_at_first(forward, held, modes, lambda: batches, written)
            return plainly(again, *args, **kwargs)

        return call

    return wrapped


def _as_at_first(
    forward: Forward,
    block: nn.Module,
    modes: Modes,
    batches: Callable[[], int],
    written: _Written,
) -> Forward:
    """Return ``forward``, whose second run repeats the first one.

    The second run uses the same ``modes``, the same contents of lists, and the same values of the
    buffers that the block changes. Only the first run changes them. ``written`` says which they
    are. Batch statistics are no such buffers: outputs of norms in training do not depend on them.
    ``batches`` returns how many batches the norms have counted. If a norm ran in evaluation and its
    statistics have changed since, the second run raises ``Refused``.
    """
    lists: dict[int | str, Any] = {}
    values: Values = []
    evaluates = any(isinstance(each, _NormBase) and not mode for each, mode in modes)
    counted, ran = batches(), False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal ran
        if not ran:
            ran = True
            given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            lists.update({at: copy(each) for at, each in given if type(each) in (list, dict)})
            with written.noticed(block, values):
                return forward(*args, **kwargs)
        if evaluates and batches() > counted:
            raise Refused(STATISTICS_CHANGED, "checkpointing")
        # Use the tensors of this call: they may have been offloaded and restored.
        again = [copy(lists[at]) if at in lists else each for at, each in enumerate(args)]
        named = {at: copy(lists[at]) if at in lists else each for at, each in kwargs.items()}
        with _in_modes(modes), _in_place_of_buffers([*_statistics(block), *values]):
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


Buffers = dict[str, torch.Tensor | None]
"""The buffers of a module, by name."""
Values = list[tuple[Buffers, str, torch.Tensor]]
"""Buffers, and the value that each had before a block's first run."""


def _statistics(block: nn.Module) -> Values:
    """Return the batch statistics of the norms in ``block``, as they are now."""
    norms = [each._buffers for each in block.modules() if isinstance(each, _NormBase)]
    return [(held, name, b) for held in norms for name, b in held.items() if b is not None]


class _Written:
    """Finds the buffers that a block changes in its forward, but for batch statistics.

    The first call copies all buffers of the block, later calls copy those that it had changed.
    """

    def __init__(self) -> None:
        self._names: frozenset[str] | None = None
        """The names of the buffers to copy; ``None`` before the first call."""

    @contextlib.contextmanager
    def noticed(self, block: nn.Module, values: Values) -> Iterator[None]:
        """Add the buffers that the context changes to ``values``.

        Raises ``Refused`` for a buffer that the first call left alone.
        """
        owners = [each for each in block.modules() if not isinstance(each, _NormBase)]
        found = [(o._buffers, n, b) for o in owners for n, b in o._buffers.items() if b is not None]
        first, copied = self._names is None, self._names or frozenset[str]()
        before = [
            (
                held,
                name,
                buffer,
                buffer._version,
                buffer.clone() if first or name in copied else None,
            )
            for held, name, buffer in found
        ]
        yield
        changed = set(copied)
        for held, name, buffer, version, value in before:
            if held.get(name) is buffer and buffer._version == version:
                continue
            if value is None:
                raise Refused(BEGAN_TO_CHANGE.format(name), "checkpointing")
            values.append((held, name, value))
            changed.add(name)
        self._names = frozenset(changed)


@contextlib.contextmanager
def _in_place_of_buffers(values: Values) -> Iterator[None]:
    """Give buffers copies of ``values`` in the context, and restore them afterwards."""
    before = [(held, name, held[name]) for held, name, _ in values]
    for held, name, value in values:
        held[name] = value.clone()
    try:
        yield
    finally:
        for held, name, buffer in before:
            held[name] = buffer


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
