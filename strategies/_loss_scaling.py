"""Loss scaling that never leaves the root, for float16 autocast.

The script's own loss, clipping and ``.grad`` stay unscaled, so its loop needs no ``GradScaler``:
the gradient that enters the root is multiplied by the scale, every parameter's gradient is divided
by it (a power of two: exact) before it reaches ``.grad``. A step whose gradients overflowed is
left out and the scale halved, as ``torch.amp.GradScaler`` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from autofit.strategies.base import Forward, Root, Undo

START = 2.0**16
GROW_AFTER = 2000
"""Steps without an overflow after which the scale doubles; ``GradScaler``'s default."""


class _Scale(torch.autograd.Function):
    """Identity whose gradient is multiplied by the scale."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scaler: Scaler) -> torch.Tensor:
        ctx.scaler = scaler
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.scaler.scale, None


class Scaler:
    """The scale of one root, and the steps since it last changed."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.scale = START
        self._parameters = parameters
        self._good_steps = 0

    def wrap(self, forward: Forward) -> Forward:
        """Scale what flows back into the root through its floating-point outputs."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return tree_map(self._scaled, forward(*args, **kwargs))

        return call

    def unscale(self, gradient: torch.Tensor) -> torch.Tensor:
        """Divide a parameter's gradient by the scale, before it is accumulated."""
        return gradient / self.scale

    def before_step(self, optimizer: Optimizer) -> None:
        """Leave the step out if a gradient overflowed; adapt the scale."""
        ours = {id(parameter) for parameter in self._parameters}
        gradients = [
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in ours and parameter.grad is not None
        ]
        if not gradients:
            return
        if all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            self._good_steps += 1
            if self._good_steps == GROW_AFTER:
                self.scale, self._good_steps = self.scale * 2, 0
            return
        self.scale, self._good_steps = self.scale / 2, 0
        for parameter in self._parameters:
            parameter.grad = None  # an optimizer passes over parameters without a gradient

    def _scaled(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_floating_point():
            return _Scale.apply(leaf, self)  # type: ignore[no-untyped-call]
        return leaf


def scale_inside(root: Root) -> Undo:
    """Scale the gradients inside ``root``, from now until taken back."""
    parameters = [p for p in root.module.parameters() if p.requires_grad]
    scaler = Scaler(parameters)
    hooks = [parameter.register_hook(scaler.unscale) for parameter in parameters]
    undo_wrap = root.around_forward(scaler.wrap)
    undo_step = root.before_step(scaler.before_step)

    def undo() -> None:
        undo_step()
        undo_wrap()
        for hook in hooks:
            hook.remove()

    return undo
