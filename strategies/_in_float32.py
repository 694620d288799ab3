"""Steps of an optimizer whose parameters are kept in less than float32, and opened for the step.

Whatever steps them, the script's own implementation or another strategy's, finds parameters and
gradients of float32, and makes its state of that type. Some parameters are open at a time, where
the optimizer's class treats each for itself: all of ``torch.optim`` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

TOGETHER = 1 << 26
"""Elements of the parameters that are open at a time, unless one has more."""
PARTS = 16
"""The parameters are opened in at least so many parts, as far as they can be told apart."""

State = dict[str, Any]


class Form(Protocol):
    """How parameters are kept between steps."""

    def opens(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is kept so."""

    def open(self, parameter: torch.Tensor, state: State) -> torch.Tensor:
        """Return its float32 values, on its device, and bring its state into float32."""

    def close(
        self, parameter: torch.Tensor, kept: torch.Tensor, values: torch.Tensor, state: State
    ) -> None:
        """Write ``values`` into ``kept``, what the parameter holds between steps."""


def step(optimizer: Optimizer, plain: Callable[[], None], form: Form) -> None:
    """Take a step with the parameters that ``form`` opens in float32."""
    groups = optimizer.param_groups
    params = [group["params"] for group in groups]
    try:
        for some in _together(optimizer, form):
            for group, whole in zip(groups, params, strict=True):
                group["params"] = [each for each in whole if id(each) in some]
            opened = [each for each in some.values() if each.grad is not None and form.opens(each)]
            with _open(optimizer, opened, form):
                plain()
    finally:
        for group, whole in zip(groups, params, strict=True):
            group["params"] = whole


def change_type(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Give a parameter other data, of another type, and its gradient that type."""
    gradient = None if parameter.grad is None else parameter.grad.to(data.dtype)
    parameter.grad = None  # only now: memory may run out above
    parameter.data = data
    parameter.grad = gradient


def _together(optimizer: Optimizer, form: Form) -> Iterator[dict[int, torch.Tensor]]:
    """Yield the parameters, by ``id``, that are stepped together; at least once."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    most = min(TOGETHER, sum(parameter.numel() for parameter in held) // PARTS)
    own = type(optimizer).__module__.startswith("torch.optim")
    some: dict[int, torch.Tensor] = {}
    size = 0
    for parameter in held:
        opens = parameter.grad is not None and form.opens(parameter)
        if own and some and opens and size + parameter.numel() > most:
            yield some
            some, size = {}, 0
        some[id(parameter)] = parameter
        size += parameter.numel() if opens else 0
    yield some


@contextmanager
def _open(optimizer: Optimizer, parameters: Sequence[torch.Tensor], form: Form) -> Iterator[None]:
    """Within it, ``parameters`` and their gradients are float32."""
    kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
    try:
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            values = form.open(parameter, state)
            kept.append((parameter, parameter.data, parameter.grad))
            change_type(parameter, values)
        yield
    finally:
        for parameter, data, gradient in kept:
            values, parameter.grad = parameter.data, None
            parameter.data = data
            parameter.grad = gradient
            form.close(parameter, data, values, optimizer.state.get(parameter, {}))
            torch.autograd.graph.increment_version(parameter)  # the data's version is another
