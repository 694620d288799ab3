"""The kind of a call: two calls of one kind are split in the same way.

The kind consists of the structure of the arguments, the modes of all modules, the number of their
hooks, and which parameters require gradients. It also has the type and the sign of each number
among the arguments and the modules' attributes. Changes that a plan has made do not count: the kind
is the script's, and it is the same in every process.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autofit.worker.harness.batch.layout import Batch

Key = tuple[Any, ...]
Place = tuple[int, str]
"""The position of a module, and the name of one of its attributes."""
NUMBERS = (bool, int, float, str)
_NUMBERS = frozenset(NUMBERS)


class Signatures:
    """Computes the kinds of one root's calls."""

    def __init__(self, module: Callable[[], nn.Module]) -> None:
        self._module = module
        self._own: list[weakref.ref[nn.Module]] = []
        """The script's modules, in their order before a plan changed any."""
        self._scripts: dict[Place, tuple[Any, Any]] = {}
        """The script's value and the plan's value of each number or flag that a plan has
        changed."""
        self._held: tuple[object, Key] | None = None
        """The last results of ``_state`` and ``_signs``. Equal states have equal signs."""

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
        state = self._state()
        if self._held is None or self._held[0] != state:
            self._held = state, self._signs()
        return gradients, batch.spec, tuple(map(_kind, batch.leaves)), self._held[1]

    def _signs(self) -> Key:
        """Return the script's numbers and flags, without a plan's changes."""
        values = self._values()
        for place, (script, plan) in self._scripts.items():
            if values.get(place) == plan:
                values[place] = script
        held = ((*place, _sign(value)) for place, value in values.items() if value is not None)
        return tuple(sorted(held))

    def _state(self) -> tuple[list[Any], ...]:
        """Return all values that ``_values`` reads, in a form that is fast to make and to compare.

        True, 1 and 1.0 are equal, so the list has the numbers' types too.
        """
        held = [module.__dict__ for module in self._modules()]
        numbers = [[pair for pair in own.items() if type(pair[1]) in _NUMBERS] for own in held]
        return (
            numbers,
            [type(value) for own in numbers for _, value in own],
            [
                (name, None if each is None else each.requires_grad)
                for own in held
                for name, each in own["_parameters"].items()
            ],
            [len(own[hooks]) for own in held for hooks in ("_forward_hooks", "_forward_pre_hooks")],
        )

    def _values(self) -> dict[Place, Any]:
        found: dict[Place, Any] = {}
        for index, module in enumerate(self._modules()):
            for name, value in module.__dict__.items():
                if type(value) in _NUMBERS:
                    found[index, name] = value
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
