"""Splits weights while the script creates a model that does not fit on the device in float32.

Usually the weights are split at the model's first call. That is too late if the parameters fill
``SHARE`` of the memory before. Then the existing parameters become bfloat16 at once, and later ones
as they are created. Their low halves are stored in host memory. Initial values that are drawn after
that are drawn in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from autofit.strategies.base import Forward, ProcessHandle, Undo
from autofit.strategies.precision import autocast
from autofit.strategies.support.in_float32 import change_type
from autofit.strategies.support.memory import device_capacity
from autofit.strategies.weights.split_float32 import (
    halves,
    loaded,
    put_rest,
    script_values,
    some_split,
)

SHARE = 0.4
"""Share of the device's memory. Gradients of the same size would nearly fill the device."""


def _cast(forward: Forward) -> Forward:
    """Run a model under autocast if its weights were split during creation.

    Such a model does not run without autocast. The gradient check uses it too, because the model
    does not fit in float32. So the check compares the rest of the plan, beside bf16 weights.
    """
    half = autocast(forward, torch.bfloat16)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (half if some_split() else forward)(*args, **kwargs)

    return call


class SplitWhileMade:
    """Watches the creation of parameters, from ``attach`` to ``detach``."""

    def __init__(self, process: ProcessHandle) -> None:
        self._process = process
        self._come = WeakTensorKeyDictionary()
        """Float32 parameters on a GPU."""
        self._short = False
        self._undos: list[Undo] = []

    def attach(self) -> Undo:
        """Watch parameters that a module registers or moves."""
        self._undos.append(self._process.show_weights(script_values, loaded))
        self._undos.append(self._process.around_calls(_cast))
        hook = register_module_parameter_registration_hook(self._registered)
        self._undos.append(hook.remove)
        self._undos.append(self._process.patch(nn.Module, "_apply", self._moves))
        return self.detach

    def detach(self) -> None:
        """Restore torch."""
        while self._undos:
            self._undos.pop()()
        self._come.clear()

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if self._is_to_split(parameter, parameter):
            upper, rest = halves(parameter.data)
            change_type(parameter, upper)
            put_rest(parameter, rest.cpu())

    def _moves(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def apply(module: nn.Module, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def converted(tensor: torch.Tensor) -> Any:
                found = fn(tensor)
                if not self._is_to_split(tensor, found):
                    return found
                upper, rest = halves(found.detach())
                put_rest(tensor, rest.cpu())  # in effect once the parameter is bfloat16
                return upper

            return plain(module, converted, *args, **kwargs)

        return apply

    def _is_to_split(self, parameter: torch.Tensor, held: torch.Tensor) -> bool:
        """Note that ``parameter`` will hold ``held``. Return whether it must be split.

        When the parameters exceed the limit for the first time, split all earlier ones.
        """
        if type(parameter) is not nn.Parameter or held.dtype is not torch.float32:
            return False
        if (most := device_capacity(held.device)) is None:
            return False
        if not self._short:
            self._come[parameter] = True
            there = [each for each in list(self._come) if each.dtype is torch.float32]
            self._short = sum(each.nbytes for each in there) > SHARE * most
            if self._short:
                for each in there:
                    if each is not parameter and each.device == held.device:
                        upper, rest = halves(each.data)
                        change_type(each, upper)
                        put_rest(each, rest.cpu())
        return self._short
