"""The parameters a step differentiates, and what a backward has done to them. Imports torch."""

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
    """The parameters of one step function, found once and looked for again after a failure."""

    def __init__(self) -> None:
        self._known: dict[int, ref[torch.Tensor]] = {}

    def learn(self, loss: torch.Tensor, function: Callable[..., Any], arguments: Arguments) -> None:
        """Find them in the graph of a loss, and among what the function can reach."""
        if not self._known:
            self._add(in_graph(loss))
            found = (each() for each in outer_models.parameters(function, arguments))
            self._add(each for each in found if each is not None)

    def _add(self, found: Iterable[torch.Tensor]) -> None:
        self._known |= {id(each): ref(each) for each in found if each.requires_grad}

    def now(self) -> Gradients:
        """Return the gradients as they are."""
        alive = [parameter for each in self._known.values() if (parameter := each()) is not None]
        return Gradients(alive)

    def unknown(self, failed: torch.Tensor) -> bool:
        """Return whether a failed loss leads to a gradient of which nothing was noted before."""
        missed = [each for each in in_graph(failed) if id(each) not in self._known]
        self._add(missed)
        return any(each.grad is not None for each in missed)


class Gradients:
    """Which gradients there were, at one moment. Holds no gradient."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self._parameters = parameters
        self._states = [_state(each) for each in parameters]
        self.empty = all(state is None for state in self._states)

    def clear(self) -> None:
        """Drop all that has arrived, where there was none."""
        for parameter in self._parameters:
            parameter.grad = None

    def missing(self) -> list[torch.Tensor]:
        """Return the parameters to which nothing has arrived since."""
        pairs = zip(self._parameters, self._states, strict=True)
        return [parameter for parameter, state in pairs if _state(parameter) == state]


def _state(parameter: torch.Tensor) -> _State:
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)


def in_graph(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaves that a backward pass from ``loss`` would bring gradients to."""
    return list({id(tensor): tensor for tensor in differentiated([loss])}.values())
