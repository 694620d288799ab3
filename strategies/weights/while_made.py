"""Splits weights while a model is made, on a device that has no room for them in float32.

Else they are split at the model's first call, from what the script has put into them. Where its
parameters come to fill ``SHARE`` of what the device may hold, that is too late: those there are
become bfloat16 at once, those that follow as they come, and their other halves go to host memory.
What is drawn into them after that is drawn in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from autofit.strategies.base import Forward, Process, Undo
from autofit.strategies.precision import autocast
from autofit.strategies.support.in_float32 import change_type
from autofit.strategies.weights.split_float32 import (
    halves,
    loaded,
    put_rest,
    script_values,
    some_split,
)

SHARE = 0.4
"""Of the device's memory; with as much again for gradients it would be nearly full."""


def device_capacity(device: torch.device) -> int | None:
    """Return the bytes that this process may hold on a GPU; ``None`` of other devices."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return int(total * torch.cuda.get_per_process_memory_fraction(device))


def _cast(forward: Forward) -> Forward:
    """Run a model whose weights were split as they came under autocast: nothing else can.

    It is so too where a plan is proven: in float32 there is no room for the model. What is shown
    then is that all else in the plan changes nothing, beside weights in bf16.
    """
    half = autocast(forward, torch.bfloat16)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (half if some_split() else forward)(*args, **kwargs)

    return call


class SplitWhileMade:
    """Watches parameters come, from ``attach`` until it is taken back."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._come = WeakTensorKeyDictionary()
        """Parameters of float32 on a GPU."""
        self._short = False
        self._undos: list[Undo] = []

    def attach(self) -> Undo:
        """Watch what is registered with a module, and what a module moves."""
        self._undos.append(self._process.show_weights(script_values, loaded))
        self._undos.append(self._process.around_calls(_cast))
        hook = register_module_parameter_registration_hook(self._registered)
        self._undos.append(hook.remove)
        self._undos.append(self._process.patch(nn.Module, "_apply", self._moves))
        return self.detach

    def detach(self) -> None:
        """Leave torch as it was."""
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
                put_rest(tensor, rest.cpu())  # it counts once the parameter holds the upper half
                return upper

            return plain(module, converted, *args, **kwargs)

        return apply

    def _is_to_split(self, parameter: torch.Tensor, held: torch.Tensor) -> bool:
        """Take note of a parameter that comes to hold ``held``; say whether there is no room."""
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
