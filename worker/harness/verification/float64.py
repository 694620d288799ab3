"""Runs a model in float64, whatever its own precision.

In float64, the order of sums changes a gradient by about 1e-13, so a larger difference is no
rounding. Parameters are widened where they are used (``shifted_weights``). A dispatch mode below
autograd widens all other arguments, and replaces lower precisions that the model's code requests
(``logits.float()``, ``torch.zeros(..., dtype=...)``). Small buffers and attributes get copies in
float64, because a forward may add to them.

Operations that TorchScript has fused on a GPU never reach the mode. They compute in the precision
they were compiled for, so a whole number that DeBERTa rounds from a logarithm may differ by one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.torch_state.modules import moves_together
from autofit.worker.harness.torch_state.rng import Ambient
from autofit.worker.harness.verification.shifted_weights import Move, ShiftedWeights, changed, still
from autofit.worker.meter import accelerator

WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
"""The double-precision type for each lower precision."""
COMPARING = (
    nn.functional.scaled_dot_product_attention,
    nn.functional.prelu,
    torch.prelu,
    nn.functional.bilinear,
)
"""Functions of torch that reject arguments of two precisions before the dispatch mode sees them."""
LARGE = 1 << 20
"""Tensors with more entries get no twin: operations widen what they use of them."""


SLOW = 4.0
"""Seconds of a few samples' forward above which float64 is not used. A check has some thirty times
as much. Most GPUs compute in float64 at a thirtieth of their speed, or less."""


TOO_SLOW = "this device is slow in float64"


class CannotRun(Exception):
    """The model cannot run in float64, whatever the batch."""


_slow: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
"""Models that this device computes too slowly in float64, by their ``id``."""


@contextmanager
def soon(module: nn.Module, forwards: float = 1.0) -> Iterator[None]:
    """Raise ``CannotRun`` if this context takes longer than ``forwards`` times ``SLOW``.

    ``in_float64`` refuses ``module`` from then on.
    """
    begun = time.monotonic()
    yield
    accelerator.synchronize()
    if time.monotonic() - begun > forwards * SLOW:
        _slow[id(module)] = module
        raise CannotRun(TOO_SLOW)


def is_low(value: Any) -> bool:
    """Return whether a value is a tensor of less than double precision."""
    return isinstance(value, torch.Tensor) and value.dtype in WIDER


def widened(value: Any) -> Any:
    """Return a tensor in double precision, and any other value as it is."""
    return value.to(WIDER[value.dtype]) if is_low(value) else value


def widened_batch(batch: Batch) -> Batch:
    """Return a call's arguments in float64; those that require gradients are leaf tensors."""
    return Batch([_leaf(each) if is_low(each) else each for each in batch.leaves], batch.spec)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.detach().to(WIDER[tensor.dtype])
    return wide.requires_grad_(tensor.requires_grad)


@contextmanager
def in_float64(module: nn.Module, move: Move = still) -> Iterator[ShiftedWeights]:
    """Let ``module`` compute in float64 with shifted weights within the context.

    Afterwards, parameters, buffers and attributes are the same objects with the same values. Raises
    ``CannotRun`` if the model has tensors of another class than torch's own.
    """
    if _slow.get(id(module)) is module:
        raise CannotRun(TOO_SLOW)
    if moves_together(module):
        raise CannotRun("the model's weights are sharded or paged")
    default = torch.get_default_dtype()
    weights = _Above(module, move)
    with ExitStack() as stack:
        stack.enter_context(_held_in(weights, module))
        stack.enter_context(Ambient.now().off().again())
        stack.callback(torch.set_default_dtype, default)
        torch.set_default_dtype(torch.float64)
        stack.enter_context(weights)
        stack.enter_context(weights.saving())
        stack.enter_context(_Below())
        yield weights


class _Above(ShiftedWeights):
    """Passes shifted weights and twins to torch's functions."""

    def __init__(self, module: nn.Module, move: Move) -> None:
        super().__init__(module, move, WIDER)
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for each in module.parameters():
            if not (each.is_floating_point() or each.is_complex()):
                raise CannotRun("the model's weights are quantized")
            if is_low(each) and not self.covers(each):
                raise CannotRun(f"the model has a {type(each).__name__}")

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the twin of a small tensor that is no parameter; create it at the first call."""
        if not is_low(tensor) or self.covers(tensor) or tensor.numel() > LARGE:
            return tensor
        if id(tensor) not in self._twins:
            if type(tensor) not in (torch.Tensor, nn.Buffer):
                raise CannotRun(f"the model holds a {type(tensor).__name__}")
            twin = _leaf(tensor)
            vars(twin).update(vars(tensor))
            self._twins[id(tensor)] = tensor, twin
        return self._twins[id(tensor)][1]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in COMPARING:
            args, kwargs = changed(args, self._both), changed(kwargs or {}, self._both)
        return super().__torch_function__(func, types, args, kwargs)

    def replaced(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) in self._twins:
            return self._twins[id(value)][1]
        return super().replaced(value)

    def _both(self, value: Any) -> Any:
        return widened(self.replaced(value))


@contextmanager
def _held_in(weights: _Above, module: nn.Module) -> Iterator[None]:
    """Put twins into ``module`` within the context; attributes set meanwhile are removed."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (held, dict(held))
        for each in module.modules()
        for held in (each._parameters, each._buffers, vars(each))
    ]
    try:
        for held, before in kept:
            for name, value in before.items():
                if isinstance(value, torch.Tensor) and (value.is_leaf or not value.requires_grad):
                    held[name] = weights.twin(value)
        yield
    finally:
        for held, before in reversed(kept):
            held.clear()
            held.update(before)


class _Below(TorchDispatchMode):
    """Computes in double precision instead of a lower precision."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.is_view:
            return func(*args, **kwargs)
        written = _written(func)
        args = [
            value if index in written else changed(value, _wide) for index, value in enumerate(args)
        ]
        kwargs = {
            name: value if name in written else changed(value, _wide)
            for name, value in kwargs.items()
        }
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else widened(value)


@functools.cache
def _written(func: OpOverload) -> frozenset[int | str]:
    """Return the positions and names of the arguments that an operator writes to."""
    found = [
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return frozenset(each for pair in found for each in pair)
