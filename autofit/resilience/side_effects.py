"""Finds optimizer steps of a failed call on parameters from outside it. Imports torch.

A retry would train such parameters twice on the same data. This module holds parameters by weak
references only. When the frames of the failed call are cleared, its own parameters are freed, and
those that are still alive came from outside.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Self

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autofit.strategies.support.optimizers import parameters

_Versions = list[tuple["weakref.ref[torch.Tensor]", int]]


class _SteppedOptimizer:
    """An optimizer whose ``step`` was entered during the call."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.name = type(optimizer).__name__
        self.counted = type(optimizer).__module__.startswith("torch.optim")
        """Optimizers of torch raise a tensor's version; others may write through raw pointers."""
        self.completed = False
        self.parameters: _Versions = [(weakref.ref(p), p._version) for p in parameters(optimizer)]
        state = (each for each in optimizer.state.values() if isinstance(each, dict))
        tensors = (v for each in state for v in each.values() if isinstance(v, torch.Tensor))
        self.state: _Versions = [(weakref.ref(each), each._version) for each in tensors]
        self.fresh = [ref for ref, _ in self.parameters if ref() not in optimizer.state]
        """Parameters that had no optimizer state before the step."""

    def changed(self) -> bool:
        """Return whether the step changed a parameter or a state tensor that is still alive."""
        if all(ref() is None for ref, _ in self.parameters):
            return False
        if self.completed or not self.counted:
            return True
        known = ((ref(), version) for ref, version in (*self.parameters, *self.state))
        return any(each is not None and each._version != version for each, version in known)

    def undo(self) -> None:
        """Remove the state that an interrupted first step began to create."""
        optimizer = self.optimizer()
        if optimizer is not None:
            for parameter in (ref() for ref in self.fresh):
                if parameter is not None:
                    optimizer.state.pop(parameter, None)


class OptimizerSteps:
    """Records the optimizer steps of this process while a decorated function runs."""

    __slots__ = ("_handles", "_seen")

    def __init__(self) -> None:
        self._seen: dict[int, _SteppedOptimizer] = {}
        self._handles: tuple[Any, ...] = ()

    def __enter__(self) -> Self:
        self._handles = (
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ended),
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _begins(self, optimizer: Optimizer, *_: Any) -> None:
        known = self._seen.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer:
            self._seen[id(optimizer)] = _SteppedOptimizer(optimizer)

    def _ended(self, optimizer: Optimizer, *_: Any) -> None:
        if (stepped := self._seen.get(id(optimizer))) is not None:
            stepped.completed = True

    def changed(self) -> str | None:
        """Return the class name of an optimizer that changed parameters from outside the call.

        Call this after the frames of the failed call are cleared. If no optimizer did, it returns
        ``None`` and removes the state that interrupted first steps began to create.
        """
        for stepped in self._seen.values():
            if stepped.changed():
                return stepped.name
        for stepped in self._seen.values():
            stepped.undo()
        return None
