"""Loss scaling inside the root, for float16 autocast.

The script's loss, clipping and ``.grad`` are unscaled, so its loop needs no ``GradScaler``. The
gradient that enters the root is multiplied by the scale. Gradients of parameters and arguments are
divided by it, exactly, because the scale is a power of two. For this the root's forward uses views
of its parameters that divide. A gradient that reaches a weight outside the root, such as one of a
penalty, is not scaled. If gradients overflow, the step is skipped and the scale is halved, as in
``torch.amp.GradScaler``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from autofit.strategies.base import Forward, Root, Undo

START = 2.0**16
GROW_AFTER = 2000
"""Steps without overflow before the scale doubles; ``GradScaler``'s default."""


class _Scale(torch.autograd.Function):
    """Identity whose gradient is multiplied by the scale."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scaler: Scaler) -> torch.Tensor:
        ctx.scaler = scaler
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.scaler.scale, None


class _Unscale(torch.autograd.Function):
    """Identity whose gradient is divided by the scale."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scaler: Scaler) -> torch.Tensor:
        ctx.scaler = scaler
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient / ctx.scaler.scale, None


class Scaler:
    """The scale of one root, and the number of steps since it changed."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.scale = START
        self._parameters = parameters
        self._good_steps = 0

    def wrap(self, forward: Forward, module: nn.Module) -> Forward:
        """Scale the gradients inside ``module``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            args, kwargs = tree_map(self._unscaled, (args, kwargs))
            with self._parameters_replaced(module):
                outputs = forward(*args, **kwargs)
            return tree_map(self._scaled, outputs)

        return call

    @contextmanager
    def _parameters_replaced(self, module: nn.Module) -> Iterator[None]:
        """Return a context in which the module computes with views of its parameters."""
        views: dict[int, torch.Tensor] = {}
        before = []
        for each in module.modules():
            for name, parameter in each._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    before.append((each, name, parameter))
                    views.setdefault(id(parameter), self._unscaled(parameter))
        try:
            for each, name, parameter in before:
                each._parameters[name] = views[id(parameter)]  # type: ignore[assignment]
            _flatten(module)
            yield
        finally:
            for each, name, parameter in before:
                each._parameters[name] = parameter
            _flatten(module)

    def before_step(self, optimizer: Optimizer) -> None:
        """Skip the step if a gradient overflowed, and adapt the scale."""
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
            parameter.grad = None  # optimizers skip parameters without a gradient

    def _scaled(self, leaf: Any) -> Any:
        return _Scale.apply(leaf, self) if _flows(leaf) else leaf  # type: ignore[no-untyped-call]

    def _unscaled(self, leaf: Any) -> Any:
        return _Unscale.apply(leaf, self) if _flows(leaf) else leaf  # type: ignore[no-untyped-call]


def _flows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_floating_point()


def _flatten(module: nn.Module) -> None:
    """Let recurrent layers update their second list of weights."""
    for each in module.modules():
        if isinstance(each, nn.RNNBase):
            each._flat_weights = [getattr(each, name) for name in each._flat_weights_names]


def scale_inside(root: Root) -> Undo:
    """Scale the gradients inside ``root`` until the undo."""
    parameters = [p for p in root.module.parameters() if p.requires_grad]
    scaler = Scaler(parameters)
    undo_wrap = root.around_forward(lambda forward: scaler.wrap(forward, root.module))
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: scaler.before_step(optimizer))
    undo_step = root.outliving(handle.remove)

    def undo() -> None:
        undo_step()
        undo_wrap()

    return undo
