"""Notices changes of a model in its attributes, modules, parameters and hooks, by one cheap look.

A look compares references only, so it takes microseconds where a walk over the modules takes
milliseconds. It holds parameters and buffers, but no module, so that a script can free its model.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any
from weakref import ref

from torch import nn

from autofit.worker.harness.torch_state.module_state import PLAIN_TYPES, Attributes

_attributes = attrgetter("__dict__")
_children, _parameters, _buffers = map(attrgetter, ("_modules", "_parameters", "_buffers"))
_hooks = attrgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_requires_grad = attrgetter("requires_grad")
_tensor_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_values = methodcaller("values")
_joined = chain.from_iterable


class ModuleWatch:
    """Tells what of a module has changed between two looks."""

    def __init__(self, module: Callable[[], nn.Module | None]) -> None:
        self._module = module
        self.version = 0
        """Another number after each look that has found any change."""
        self.structure = 0
        """Another number after each look that has found more than other values of attributes."""
        self.forget()

    def forget(self) -> None:
        """Hold nothing of the module; the next look finds it changed."""
        self._modules: list[ref[nn.Module]] = []
        self._readers: list[Callable[[dict[str, Any]], tuple[Any, ...]]] = []
        """Each reads the plain attributes of one module."""
        self._tensors: list[nn.Parameter | None] = []
        self._buffers: list[Any] = []
        self._numbers: list[object] = []
        self._values: list[Any] = []
        self._plain: Attributes | None = None

    @property
    def modules(self) -> list[nn.Module]:
        """The module and all inside it, as of the last look."""
        held = [each() for each in self._modules]
        return [each for each in held if each is not None]

    @property
    def attributes(self) -> Attributes:
        """The plain attributes of all modules, as of the last look."""
        if self._plain is None:
            self._plain = Attributes(self.modules)
        return self._plain

    def look(self) -> None:
        """Look at the module."""
        modules = [each() for each in self._modules]
        if not modules or None in modules:
            self._take()
            return
        own = [*map(_attributes, modules)]
        try:
            values = self._read_values(own)
        except KeyError:  # an attribute was deleted, and another one set
            self._take()
            return
        if (
            self._numbers != self._read_numbers(modules, own)
            or not _same(self._tensors, [*_joined(map(_values, map(_parameters, modules)))])
            or not _same(self._buffers, [*_joined(map(_values, map(_buffers, modules)))])
        ):
            self._take()
        elif not _same(self._values, values):
            self._values, self._plain = values, None
            self.version += 1

    def _take(self) -> None:
        module = self._module()
        modules = [*module.modules()] if module is not None else []
        self._modules = [ref(each) for each in modules]
        own = [*map(_attributes, modules)]
        self._readers = [*map(_reader, own)]
        self._tensors = [*_joined(map(_values, map(_parameters, modules)))]
        self._buffers = [*_joined(map(_values, map(_buffers, modules)))]
        self._numbers, self._values = self._read_numbers(modules, own), self._read_values(own)
        self._plain = None
        self.version += 1
        self.structure += 1

    def _read_numbers(self, modules: list[Any], own: list[dict[str, Any]]) -> list[object]:
        """Return what stands for the modules, which live now, for hooks, and for all flags."""
        parameters = [each for each in self._tensors if each is not None]
        hooks = filter(None, _joined(map(_tensor_hooks, parameters)))
        return [
            *map(len, own),
            *map(id, _joined(map(_values, map(_children, modules)))),
            *_joined(_joined(map(_hooks, modules))),  # the keys, of which none comes twice
            None,
            *_joined(hooks),
            *map(_requires_grad, parameters),
        ]

    def _read_values(self, own: list[dict[str, Any]]) -> list[Any]:
        return [*_joined([read(each) for read, each in zip(self._readers, own, strict=True)])]


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))


def _reader(own: dict[str, Any]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Return what reads the plain attributes of a module."""
    names = [name for name, value in own.items() if value is None or type(value) in PLAIN_TYPES]
    return itemgetter(*names, names[0]) if names else lambda _: ()
