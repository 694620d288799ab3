"""Models that a function uses but does not make, and the gradients that a failed call left in them.

They are found among the arguments, the attributes of the function's object, its closure, and the
globals that it names. Imports torch.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.resilience.arguments import Arguments
from autofit.strategies.support.optimizers import parameters as held_by
from autofit.worker.harness.torch_state.reachable_state import named_in

_PLAIN = (
    *(str, bytes, int, float, complex, type(None), torch.Tensor, type),
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)

Parameters = list["ref[torch.Tensor]"]

_of_module: WeakKeyDictionary[nn.Module, Parameters] = WeakKeyDictionary()
"""Cache: iterating over a model's parameters takes most of the time before a call."""


class OuterGradients:
    """Identity and version, before a call, of the gradients of models from outside the function.

    It holds no tensor: when the function drops its old gradients, their memory must be freed.
    """

    __slots__ = ("_before",)

    def __init__(self, function: Callable[..., Any], arguments: Arguments) -> None:
        """Note identity and version of each parameter's gradient."""
        self._before: list[tuple[ref[torch.Tensor], tuple[int, int] | None]] = [
            (each, _state(parameter.grad))
            for each in parameters(function, arguments)
            if (parameter := each()) is not None
        ]

    def undo(self) -> bool:
        """Remove the gradients that a failed call made; return whether this undid all changes.

        Returns False if the call added to an earlier gradient or replaced it.
        """
        for reference, before in self._before:
            parameter = reference()
            if parameter is None:
                continue
            if before is None:
                parameter.grad = None
            elif parameter.grad is not None and _state(parameter.grad) != before:
                return False
        return True


def _state(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (id(gradient), gradient._version)


def parameters(function: Callable[..., Any], arguments: Arguments) -> Parameters:
    """Return the parameters of the models and optimizers that ``function`` can reach."""
    found: dict[int, ref[torch.Tensor]] = {}
    for value in _values(function, arguments):
        if isinstance(value, nn.Module):
            for each in _parameters(value):
                found[id(each())] = each
        elif isinstance(value, Optimizer):
            for parameter in held_by(value):
                found[id(parameter)] = ref(parameter)
    return list(found.values())


def _parameters(module: nn.Module) -> Parameters:
    known = _of_module.get(module)
    if known is None or any(each() is None for each in known):
        known = _of_module[module] = [ref(parameter) for parameter in module.parameters()]
    return known


def modules(function: Callable[..., Any], arguments: Arguments) -> Iterator[nn.Module]:
    """Yield the models that ``function`` can reach."""
    return (each for each in _values(function, arguments) if isinstance(each, nn.Module))


def _values(function: Callable[..., Any], arguments: Arguments) -> Iterator[Any]:
    args, kwargs = arguments
    yield from _contents(args)
    yield from _contents(kwargs.values())
    inner = _inner(function)
    for cell in inner.__closure__ or () if inner else ():
        try:
            yield from _contents((cell.cell_contents,))
        except ValueError:  # not assigned yet
            continue
    for name in named_in(inner.__code__) if inner else ():
        yield from _contents((inner.__globals__.get(name),) if inner else ())


def _inner(function: Callable[..., Any]) -> types.FunctionType | None:
    found: Any = function
    while not isinstance(found, types.FunctionType):
        found = getattr(found, "func", None) or getattr(found, "__func__", None)
        if found is None:
            return None
    return found


def _contents(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values, and the items of lists, dictionaries and plain objects among them."""
    for value in values:
        if isinstance(value, _PLAIN):
            continue
        yield value
        if isinstance(value, dict):
            yield from value.values() if len(value) <= _LARGEST else ()
        elif isinstance(value, (list, tuple, set)):
            yield from value if len(value) <= _LARGEST else ()
        elif not isinstance(value, (nn.Module, Optimizer)):
            yield from getattr(value, "__dict__", {}).values()


_LARGEST = 64
"""Longer collections are not searched: they hold data, not models."""
