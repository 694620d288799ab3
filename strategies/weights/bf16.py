"""Weights and optimizer state in bfloat16, rounded stochastically after each step.

With rounding to nearest most updates are lost: a step is less than half the distance between two
bfloat16 numbers. Stochastic rounding keeps the mean (Zamirai et al., 2020). It draws from a
generator of its own, so the script's random draws stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import LBFGS

from autofit.exceptions import Refused
from autofit.strategies.base import Forward, OptimizerHandle, Root, Undo
from autofit.strategies.precision import autocast
from autofit.strategies.support.in_float32 import State, change_type, step
from autofit.strategies.weights.split_float32 import convertible, forget, refuse

SEED = 0x5EED

_converted: WeakSet[nn.Module] = WeakSet()


def convert(root: Root) -> Undo:
    """Convert the float32 parameters of ``root``. This cannot be reverted."""
    module = root.module
    if module not in _converted:  # every plan of the process converts it again
        refuse(module)
        _converted.add(module)

    def wrapper(forward: Forward) -> Forward:
        return autocast(forward, torch.bfloat16)

    for parameter in module.parameters():
        forget(parameter)  # if it was split during creation
    for parameter in convertible(module):
        change_type(parameter, parameter.data.to(torch.bfloat16))
    return root.around_forward(wrapper, lasting=True)


def around(handle: OptimizerHandle) -> Undo:
    """Compute each step of an optimizer in float32, and round the result."""
    if isinstance(handle.optimizer, LBFGS):
        raise Refused("LBFGS calls the model within its step")
    rounded = _Rounded()
    return handle.around_step(lambda optimizer, plain: step(optimizer, plain, rounded))


class _Rounded:
    """Converts bfloat16 parameters for a step, and rounds them stochastically after it."""

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def opens(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is bfloat16."""
        return parameter.dtype is torch.bfloat16

    def open(
        self, parameters: Sequence[torch.Tensor], states: Sequence[State]
    ) -> Sequence[torch.Tensor]:
        """Return the values in float32. Convert the state of the same shape, too."""
        for parameter, state in zip(parameters, states, strict=True):
            for name in _of_its_shape(parameter, state):
                state[name] = state[name].float()
        return [parameter.data.float() for parameter in parameters]

    def close(
        self,
        parameters: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        states: Sequence[State],
    ) -> None:
        """Round the values into ``kept``, and round the state."""
        for parameter, held, value, state in zip(parameters, kept, values, states, strict=True):
            held.copy_(self._rounded(value))
            for name in _of_its_shape(parameter, state):
                state[name] = self._rounded(state[name])

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        device = values.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(SEED)
        return stochastic(values, self._generators[device])


def stochastic(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return ``values`` (float32) rounded stochastically to bfloat16."""
    noise = torch.empty_like(values, dtype=torch.int32)
    noise.random_(0, 1 << 16, generator=generator)
    upper = (noise.add_(values.view(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isfinite(), upper, values.to(torch.bfloat16))


def _of_its_shape(parameter: torch.Tensor, state: State) -> list[str]:
    """Return the names of the state tensors that have one number for each element."""
    return [
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.is_floating_point()
        and value.shape == parameter.shape
        and name != "step"
    ]
