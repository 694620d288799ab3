"""Optimizer steps in float32, for parameters that are stored in less.

The optimizer, or another level that steps for it, sees float32 parameters and gradients. Its state
is float32, too. Only some parameters are open at a time, if the optimizer's class updates each
parameter separately, as all of ``torch.optim`` do. They are opened and closed as one concatenated
tensor. A dozen kernels for each of hundreds of parameters would take longer to launch than to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

TOGETHER = 1 << 24
"""Elements of the parameters that are open at a time. A larger parameter is open alone."""
PARTS = 16
"""Minimum number of parts in which the parameters are opened, if there are enough of them."""

State = dict[str, Any]


class _Form(Protocol):
    """How parameters are stored between steps."""

    def opens(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is stored in this form."""

    def open(
        self, parameters: Sequence[torch.Tensor], states: Sequence[State]
    ) -> Sequence[torch.Tensor]:
        """Return the float32 values on their device, and convert the state to float32."""

    def close(
        self,
        parameters: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        states: Sequence[State],
    ) -> None:
        """Write ``values`` into ``kept``, the data of the parameters between steps."""


def step(optimizer: Optimizer, plain: Callable[[], None], form: _Form) -> None:
    """Step with the parameters of ``form`` in float32."""
    groups = optimizer.param_groups
    params = [group["params"] for group in groups]
    try:
        for some in _together(optimizer, form):
            for group, whole in zip(groups, params, strict=True):
                group["params"] = [each for each in whole if id(each) in some]
            wide_parameters = [
                each for each in some.values() if each.grad is not None and form.opens(each)
            ]
            with _open(optimizer, wide_parameters, form):
                plain()
    finally:
        for group, whole in zip(groups, params, strict=True):
            group["params"] = whole


def change_type(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Replace a parameter's data by data of another dtype, and convert its gradient."""
    gradient = None if parameter.grad is None else parameter.grad.to(data.dtype)
    parameter.grad = None  # after the cast, in which memory may run out
    parameter.data = data
    parameter.grad = gradient


def _together(optimizer: Optimizer, form: _Form) -> Iterator[dict[int, torch.Tensor]]:
    """Yield the parameters of each part by ``id``; at least one part."""
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
def _open(optimizer: Optimizer, parameters: Sequence[torch.Tensor], form: _Form) -> Iterator[None]:
    """Return a context in which ``parameters`` and their gradients are float32."""
    kept = [parameter.data for parameter in parameters]
    gradients = [parameter.grad for parameter in parameters]
    widened = form.open(parameters, _states(optimizer, parameters))
    wide = _wide([gradient for gradient in gradients if gradient is not None])
    try:
        for parameter, data, float_gradient in zip(parameters, widened, wide, strict=True):
            parameter.grad = None
            parameter.data = data
            parameter.grad = float_gradient
        del widened, wide
        yield
    finally:
        values = [parameter.data for parameter in parameters]
        for parameter, data, gradient in zip(parameters, kept, gradients, strict=True):
            parameter.grad = None
            parameter.data = data
            parameter.grad = gradient
        form.close(parameters, kept, values, _states(optimizer, parameters))
        for parameter in parameters:
            torch.autograd.graph.increment_version(parameter)  # ``.data`` has a version of its own


def _states(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> list[State]:
    return [optimizer.state.get(parameter, {}) for parameter in parameters]


def _wide(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return gradients in float32, as one concatenated tensor if possible."""
    if not in_a_row(gradients):
        return [gradient.float() for gradient in gradients]
    return cut(torch.cat([gradient.view(-1) for gradient in gradients]).float(), gradients)


def in_a_row(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors can be concatenated, to launch fewer kernels.

    They must have one dtype and one device, and be contiguous.
    """
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    plain = all(t.layout is torch.strided and t.is_contiguous() for t in tensors)
    return len(tensors) > 1 and len(kinds) == 1 and plain


def cut(row: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a vector in the shapes of ``like``."""
    parts = row.split([each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]
