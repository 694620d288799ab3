"""The parameters of a step function, and the state of their gradients. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch

from autofit.resilience import outer_models
from autofit.resilience.arguments import Arguments
from autofit.worker.harness.torch_state.graph import differentiated

_State = tuple[int, int] | None


class StepParameters:
    """The parameters of one step function, found at its first backward pass.

    A failed backward pass may show more of them.
    """

    def __init__(self) -> None:
        self._known: dict[int, ref[torch.Tensor]] = {}

    def find(self, loss: torch.Tensor, function: Callable[..., Any], arguments: Arguments) -> None:
        """Collect the parameters in the graph of ``loss`` and those that ``function`` can reach."""
        if not self._known:
            self._add(in_graph(loss))
            found = (each() for each in outer_models.parameters(function, arguments))
            self._add(each for each in found if each is not None)

    def _add(self, found: Iterable[torch.Tensor]) -> None:
        self._known |= {id(each): ref(each) for each in found if each.requires_grad}

    def snapshot(self) -> GradientSnapshot:
        """Return the current state of the gradients."""
        alive = [parameter for each in self._known.values() if (parameter := each()) is not None]
        return GradientSnapshot(alive)

    def missed(self, failed: torch.Tensor) -> bool:
        """Return whether the graph of ``failed`` holds an unknown parameter with a gradient."""
        missed = [each for each in in_graph(failed) if id(each) not in self._known]
        self._add(missed)
        return any(each.grad is not None for each in missed)


class GradientSnapshot:
    """Identity and version of each gradient at one moment; holds no gradient tensor."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self._parameters = parameters
        self._states = [_state(each) for each in parameters]
        self.empty = all(state is None for state in self._states)

    def clear(self) -> None:
        """Set every gradient to ``None``; call this only if the snapshot is ``empty``."""
        for parameter in self._parameters:
            parameter.grad = None

    def missing(self) -> list[torch.Tensor]:
        """Return the parameters whose gradient has not changed since the snapshot."""
        pairs = zip(self._parameters, self._states, strict=True)
        return [parameter for parameter, state in pairs if _state(parameter) == state]


def _state(parameter: torch.Tensor) -> _State:
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)


def in_graph(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaf tensors whose gradients a backward pass from ``loss`` computes."""
    return list({id(tensor): tensor for tensor in differentiated([loss])}.values())
