"""Optimizer state in managed memory, stepped by torch's fused kernels, or in 8 bits.

The state lies on the device as far as the kernels can tell. What a search measures is no less than
without: NVML counts the pages. But when a later batch needs more than the card has left, the driver
moves pages to the host, and the run goes on, more slowly (Dettmers et al., 2023, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.exceptions import Refused
from autofit.strategies.base import OptimizerHandle, Undo
from autofit.strategies.optimizer import managed
from autofit.strategies.optimizer.eight_bit import EightBit, understood
from autofit.strategies.optimizer.fused import (
    fused_step,
    parameters,
    place_steps,
    show,
    why_not,
    without,
)

MOMENTS = {"Adam": 2, "AdamW": 2, "SGD": 1, "Adagrad": 1}
"""Tensors that a class keeps for a parameter."""

State = dict[str, Any]


def page(handle: OptimizerHandle) -> Undo:
    """Keep the state of an optimizer in managed memory from its next step on."""
    optimizer = handle.optimizer
    if reason := why_not(optimizer):
        raise Refused(reason)
    for parameter in parameters(optimizer):
        if type(parameter) not in (nn.Parameter, torch.Tensor):
            raise Refused(f"a parameter is a {type(parameter).__name__}")
    for group in optimizer.param_groups:
        if "momentum" in group and not group["momentum"]:
            raise Refused(f"{type(optimizer).__name__} without momentum keeps no state")
    managed.require(_needed(optimizer, list(parameters(optimizer))))
    return Paged(handle).undo


def page_eight_bit(handle: OptimizerHandle) -> Undo:
    """Keep the state of an optimizer in 8 bits, and those in managed memory."""
    optimizer = handle.optimizer
    algorithm = understood(optimizer)
    held, codes = list(parameters(optimizer)), len(algorithm.moments)
    managed.require((p.device, codes * p.numel() if _is_large(p) else 0) for p in held)
    return EightBit(handle, algorithm, _codes).undo


class Paged:
    """The paged state of one optimizer, kept in its ``state``."""

    def __init__(self, handle: OptimizerHandle) -> None:
        self._handle = handle
        self._undos: list[Undo] = [handle.around_step(self.step), handle.show_state(show)]

    def undo(self) -> None:
        """Move the state back into memory of torch's."""
        while self._undos:
            self._undos.pop()()
        optimizer = self._handle.optimizer
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and managed.is_managed(value):
                    state[name] = value.clone()
        place_steps(optimizer, on_device=False)
        vars(optimizer).pop("_need_device_dtype_check_for_fused", None)  # torch's own note

    def step(self, optimizer: Any, plain: Callable[[], None]) -> None:
        """Step with the fused kernels; a parameter whose state is new, or was loaded, by itself.

        So there is never more than one parameter's state in memory of torch's.
        """
        held = [p for p in parameters(optimizer) if p.grad is not None and _is_large(p)]
        waiting = [p for p in held if not _is_paged(optimizer, p)]
        if waiting:
            managed.require(_needed(optimizer, waiting))
        every = {id(parameter) for parameter in parameters(optimizer)}
        for parameter in waiting:
            with without(optimizer, frozenset(every - {id(parameter)})):
                fused_step(optimizer, plain)
            state: State = optimizer.state[parameter]
            for name, value in state.items():
                if _is_moment(value, parameter):
                    state[name] = managed.moved(value)
        with without(optimizer, frozenset(map(id, waiting))):
            fused_step(optimizer, plain)


def _needed(optimizer: Optimizer, held: list[torch.Tensor]) -> list[tuple[torch.device, int]]:
    """Return the bytes of managed memory that parameters take, each with its device."""
    moments = MOMENTS[type(optimizer).__name__]
    moments += any(group.get("amsgrad") for group in optimizer.param_groups)
    return [(p.device, moments * p.nbytes if _is_large(p) else 0) for p in held]


def _is_large(parameter: torch.Tensor) -> bool:
    """Whether a parameter's state is worth pages of its own."""
    return parameter.numel() >= managed.LARGE


def _is_paged(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    """Whether a parameter has state, all in managed memory."""
    state = optimizer.state.get(parameter, {})
    moments = [value for value in state.values() if _is_moment(value, parameter)]
    return bool(moments) and all(map(managed.is_managed, moments))


def _is_moment(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a part of a state is as large as the parameter."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _codes(count: int, device: torch.device) -> torch.Tensor:
    """Return zeros for so many codes, in managed memory where they are many."""
    if count < managed.LARGE:
        return torch.zeros(count, dtype=torch.uint8, device=device)
    return managed.zeros(count, torch.uint8, device)
