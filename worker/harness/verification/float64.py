"""Runs a model in float64, whatever its own precision.

In float64, the order of sums changes a gradient by about 1e-13, so a larger difference is no
rounding. Within ``in_float64``, the modules have float64 twins of their parameters, buffers and
tensors; the parameters themselves do not change. A dispatch mode below autograd replaces lower
precisions that the model's code requests (``logits.float()``, ``torch.zeros(..., dtype=...)``) by
float64. A function mode above autograd replaces parameters that the code has elsewhere by their
twins: in a list, in a closure, in the flat weights of a recurrent network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.torch_state.modules import moves_together
from autofit.worker.harness.torch_state.rng import Ambient

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


class CannotRun(Exception):
    """The model cannot run in float64, whatever the batch."""


def is_low(value: Any) -> bool:
    """Return whether a value is a tensor of less than double precision."""
    return isinstance(value, torch.Tensor) and value.dtype in WIDER


def widened(value: Any) -> Any:
    """Return a tensor in double precision, and any other value as it is."""
    return value.to(WIDER[value.dtype]) if is_low(value) else value


def widened_batch(batch: Batch) -> Batch:
    """Return a call's arguments in float64; those that require gradients are leaf tensors."""
    return Batch([_leaf(each) if is_low(each) else each for each in batch.leaves], batch.spec)


class Twins:
    """The float64 twins of a model's tensors."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's twin, or the tensor itself if it has none."""
        return self._made[id(tensor)][1] if id(tensor) in self._made else tensor

    def make(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's twin; create it at the first call."""
        if not is_low(tensor):
            return tensor
        if id(tensor) not in self._made:
            if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
                raise CannotRun(f"the model holds a {type(tensor).__name__}")
            self._made[id(tensor)] = tensor, _twin(tensor)
        return self._made[id(tensor)][1]


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    twin = _leaf(tensor)
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin.detach(), requires_grad=tensor.requires_grad)
    vars(twin).update(vars(tensor))
    return twin


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.detach().to(WIDER[tensor.dtype])
    return wide.requires_grad_(tensor.requires_grad)


@contextmanager
def in_float64(module: nn.Module) -> Iterator[Twins]:
    """Let ``module`` compute in float64 within the context; yields the twins of its parameters.

    Afterwards, parameters, buffers and attributes are the same objects with the same values. Raises
    ``CannotRun`` if the model has tensors of another class than torch's own.
    """
    if moves_together(module):
        raise CannotRun("the model's weights are spread over the ranks")
    twins = Twins()
    default = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(_held_in(twins, module))
        stack.enter_context(Ambient.now().off().again())
        stack.callback(torch.set_default_dtype, default)
        torch.set_default_dtype(torch.float64)
        stack.enter_context(_Above(twins))
        stack.enter_context(_Below())
        yield twins


@contextmanager
def _held_in(twins: Twins, module: nn.Module) -> Iterator[None]:
    """Put ``twins`` into ``module`` within the context; attributes set meanwhile are removed."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (held, dict(held)) for each in module.modules() for held in _holding(each)
    ]
    try:
        for held, before in kept:
            for name, value in before.items():
                if isinstance(value, torch.Tensor) and (value.is_leaf or not value.requires_grad):
                    held[name] = twins.make(value)
        yield
    finally:
        for held, before in reversed(kept):
            held.clear()
            held.update(before)


def _holding(module: nn.Module) -> tuple[dict[str, Any], ...]:
    parameters: dict[str, Any] = module._parameters
    return parameters, module._buffers, vars(module)


class _Above(TorchFunctionMode):
    """Passes each tensor's twin to torch's functions."""

    def __init__(self, twins: Twins) -> None:
        super().__init__()
        self._twins = twins

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        change = self._both if func in COMPARING else self._twin
        return func(*_changed(args, change), **_changed(kwargs or {}, change))

    def _twin(self, value: Any) -> Any:
        return self._twins.of(value) if isinstance(value, torch.Tensor) else value

    def _both(self, value: Any) -> Any:
        return widened(self._twin(value))


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
            value if index in written else _changed(value, _wide)
            for index, value in enumerate(args)
        ]
        kwargs = {
            name: value if name in written else _changed(value, _wide)
            for name, value in kwargs.items()
        }
        return func(*args, **kwargs)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return arguments with ``change`` applied to each value, also in lists.

    It is faster than torch's pytree.
    """
    if type(value) in (list, tuple):
        return type(value)(_changed(each, change) for each in value)
    if type(value) is dict:
        return {name: _changed(each, change) for name, each in value.items()}
    return change(value)


def _wide(value: Any) -> Any:
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else widened(value)


@functools.cache
def _written(func: OpOverload) -> frozenset[int | str]:
    """Return the positions and names of the arguments that an operator writes to."""
    changed = [
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return frozenset(each for pair in changed for each in pair)
