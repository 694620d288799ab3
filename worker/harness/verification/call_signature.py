"""The kind of a call: two calls of one kind are split in the same way.

The kind consists of the structure of the arguments, the modes of all modules, the number of their
hooks, and which parameters and other tensors require gradients. It also has the type and the sign
of each number among the arguments and the modules' attributes. Changes that a plan has made do not
count: the kind is the script's, and it is the same in every process.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.torch_state.module_watch import ModuleWatch

Key = tuple[Any, ...]
Place = tuple[int, str]
"""The position of a module, and the name of one of its attributes."""
NUMBERS = (bool, int, float, str)
_NUMBERS = frozenset(NUMBERS)


class Signatures:
    """Computes the kinds of one root's calls."""

    def __init__(self, module: Callable[[], nn.Module], watch: ModuleWatch) -> None:
        """``watch`` tells, as of its last look, whether the module has changed."""
        self._module, self._watch = module, watch
        self._own: list[weakref.ref[nn.Module]] = []
        """The script's modules, in their order before a plan changed any."""
        self._scripts: dict[Place, tuple[Any, Any]] = {}
        """The script's value and the plan's value of each number or flag that a plan has
        changed."""
        self._held: tuple[int, Key] | None = None
        """The version of the module for which ``_signs`` was called last, and what it returned."""

    def around(self, change: Callable[[], None]) -> None:
        """Let a plan change the model; its changes do not count as another kind of call."""
        before = self._values()
        try:
            change()
        finally:
            after = self._values()
            for place in before | after:
                old, new = before.get(place), after.get(place)
                if old != new:
                    self._scripts.setdefault(place, (old, None))
                    self._scripts[place] = (self._scripts[place][0], new)
            self._held = None

    def of(self, batch: Batch, *, gradients: bool) -> Key:
        """Return the kind of a call. Its ``repr`` is the same in every process."""
        version = self._watch.version
        if self._held is None or self._held[0] != version:
            self._held = version, self._signs()
        return gradients, batch.spec, tuple(map(_kind, batch.leaves)), self._held[1]

    def _signs(self) -> Key:
        """Return the script's numbers and flags, without a plan's changes."""
        values = self._values()
        for place, (script, plan) in self._scripts.items():
            if values.get(place) == plan:
                values[place] = script
        held = ((*place, _sign(value)) for place, value in values.items() if value is not None)
        return tuple(sorted(held))

    def _values(self) -> dict[Place, Any]:
        found: dict[Place, Any] = {}
        for index, module in enumerate(self._modules()):
            for name, value in module.__dict__.items():
                if type(value) in _NUMBERS:
                    found[index, name] = value
                elif isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
                    found[index, f"{name} requires_grad"] = True
            if module._forward_hooks or module._forward_pre_hooks:
                found[index, "hooks"] = str(
                    len(module._forward_hooks) + len(module._forward_pre_hooks)
                )
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    found[index, f"{name} requires_grad"] = parameter.requires_grad
        return found

    def _modules(self) -> Iterator[nn.Module]:
        """Yield the script's modules, without those that a plan has added."""
        held = [each() for each in self._own]
        there = [each for each in held if each is not None]
        if not there or len(there) < len(held):
            there = list(self._module().modules())
            self._own = [weakref.ref(each) for each in there]
        yield from there


def _kind(leaf: Any) -> object:
    if isinstance(leaf, torch.Tensor):
        return leaf.ndim, str(leaf.dtype), leaf.requires_grad
    if leaf is None or type(leaf) in _NUMBERS:
        return _sign(leaf)
    return type(leaf).__qualname__


def _sign(value: Any) -> str:
    """Return a number's type and sign: with another sign it may switch something on or off."""
    if type(value) not in (int, float):
        return repr(value)
    if not math.isfinite(value):
        return f"{type(value).__name__} {value}"
    return f"{type(value).__name__} {(value > 0) - (value < 0)}"
