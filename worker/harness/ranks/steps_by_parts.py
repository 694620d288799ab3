"""Steps the parts of sharded parameters; the script sees and loads whole states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autofit.exceptions import Refused
from autofit.strategies.base import OptimizerHandle, Undo
from autofit.strategies.support.optimizer_classes import ELEMENTWISE
from autofit.worker.harness.ranks.sharded_state import SCALED, State, why_not
from autofit.worker.harness.ranks.whole_tensors import WholeTensors


def follow_weights(handle: OptimizerHandle, whole: WholeTensors) -> Undo:
    """Let an optimizer step sharded parameters from now on; raise ``Refused`` if it cannot."""
    optimizer = handle.optimizer
    if reason := why_not(optimizer, ELEMENTWISE):
        raise Refused(reason)

    def step(optimizer: Any, plain: Callable[[], None]) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:
            raise Refused(SCALED)
        whole.check()
        _divide(optimizer, whole)
        with whole.by_parts():
            plain()

    def show(parameter: Any, state: State) -> State:
        return {
            name: whole.on_host(value) if isinstance(value, DTensor) else value
            for name, value in state.items()
        }

    hook = optimizer.register_load_state_dict_post_hook(lambda each: _divide(each, whole))
    undos = [hook.remove, handle.show_state(show), handle.around_step(step)]

    def undo() -> None:
        while undos:
            undos.pop()()

    return undo


def _divide(optimizer: Optimizer, whole: WholeTensors) -> None:
    """Keep this rank's part of each state that was loaded, or that was there before."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for name, value in state.items():
            plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if plain and value.dim() and value.shape == parameter.shape:
                state[name] = whole.part(value, parameter)
