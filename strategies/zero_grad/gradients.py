"""Frees gradients that the script sets to zero, and restores zeros before a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from autofit.strategies.base import Root, Undo

OWNERS = (Optimizer, nn.Module)
"""Classes that have a ``zero_grad``."""


class Dropped:
    """Parameters whose zeros were freed and have not been restored."""

    def __init__(self) -> None:
        self._parameters = WeakIdKeyDictionary()

    def attach(self, root: Root) -> Undo:
        """Patch ``zero_grad``. The undo restores all missing zeros."""
        undo_step = root.before_step(lambda optimizer: self._give_back(parameters_of(optimizer)))
        undos = [root.patch(owner, "zero_grad", self._zero_grad) for owner in OWNERS]

        def undo() -> None:
            for take_back in (*undos, undo_step):
                take_back()
            self._give_back(list(self._parameters.keys()))

        return undo

    def _zero_grad(self, plain: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(self_: Any, set_to_none: bool = True) -> None:
            if not set_to_none:
                self._drop(parameters_of(self_))
            plain(self_, set_to_none)

        return zero_grad

    def _drop(self, parameters: Iterable[torch.Tensor]) -> None:
        """Free dense gradients. A sparse gradient needs no memory when it is zero."""
        for each in parameters:
            if each.grad is not None and each.grad.layout is torch.strided:
                each.grad = None
                self._parameters[each] = True

    def _give_back(self, parameters: Iterable[torch.Tensor]) -> None:
        for each in parameters:
            if self._parameters.pop(each, False) and each.grad is None:
                each.grad = torch.zeros_like(each)


def parameters_of(owner: Any) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, or of a module."""
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [each for group in owner.param_groups for each in group["params"]]
