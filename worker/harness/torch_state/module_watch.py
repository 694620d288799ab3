"""Notices changes of a model in its attributes, modules, parameters and hooks, by one cheap look.

A look compares references only, so it takes microseconds where a walk over the modules takes
milliseconds. The watch holds no module, so a script can free its model. It holds parameters,
buffers and plain values. Of other attributes it compares the types, and whether a tensor requires
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any
from weakref import ref

import torch
from torch import nn

from autofit.worker.harness.torch_state.module_state import PLAIN_TYPES, Attributes
from autofit.worker.harness.torch_state.modules import HOOKS

_attributes = attrgetter("__dict__")
_children, _parameters, _buffers = map(attrgetter, ("_modules", "_parameters", "_buffers"))
INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_hooks = attrgetter(*HOOKS)
_requires_grad = attrgetter("requires_grad")
_tensor_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_values = methodcaller("values")
_joined = chain.from_iterable
Reader = Callable[[dict[str, Any]], tuple[Any, ...]]


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
        self._readers: list[tuple[Reader, Reader]] = []
        """Each pair reads the plain and the other attributes of one module."""
        self._tensors: list[nn.Parameter | None] = []
        self.trained: list[nn.Parameter] = []
        """The parameters that require gradients, as of the last look."""
        self._buffers: list[Any] = []
        self._marks: list[object] = []
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
        try:
            marks, values = self._read_marks(modules), self._read_values(modules)
        except KeyError:  # an attribute was deleted, and another one set
            self._take()
            return
        if (
            marks != self._marks
            or not _same(self._tensors, _items(_parameters, modules))
            or not _same(self._buffers, _items(_buffers, modules))
        ):
            self._take()
        elif not _same(self._values, values):
            if PLAIN_TYPES.issuperset(map(type, values)):
                self._values, self._plain = values, None
                self.version += 1
            else:
                self._take()

    def _take(self) -> None:
        module = self._module()
        modules = [*module.modules()] if module is not None else []
        self._modules = [ref(each) for each in modules]
        self._readers = [*map(_readers, map(_attributes, modules))]
        self._tensors, self._buffers = _items(_parameters, modules), _items(_buffers, modules)
        self._marks, self._values = self._read_marks(modules), self._read_values(modules)
        parameters = dict.fromkeys(each for each in self._tensors if each is not None)
        self.trained = [each for each in parameters if each.requires_grad]
        self._plain = None
        self.version += 1
        self.structure += 1

    def _read_marks(self, modules: list[Any]) -> list[object]:
        """Return what stands for modules, hooks, flags of tensors, and other attributes."""
        own = [*map(_attributes, modules)]
        parameters = [each for each in self._tensors if each is not None]
        hooks = filter(None, _joined(map(_tensor_hooks, parameters)))
        others = [*self._read(1, modules)]
        return [
            *map(len, own),
            *map(id, _items(_children, modules)),  # they live now, so no other has their place
            *_joined(_joined(map(_hooks, modules))),  # the keys, of which none comes twice
            None,
            *_joined(hooks),
            *map(_requires_grad, parameters),
            *map(type, others),
            *map(_requires_grad, [each for each in others if isinstance(each, torch.Tensor)]),
        ]

    def _read_values(self, modules: list[Any]) -> list[Any]:
        return [*self._read(0, modules)]

    def _read(self, which: int, modules: list[Any]) -> Iterable[Any]:
        pairs = zip(self._readers, map(_attributes, modules), strict=True)
        return _joined([readers[which](own) for readers, own in pairs])


def _items(mapping: Callable[[Any], Any], modules: list[Any]) -> list[Any]:
    """Return the values of one mapping of each module."""
    return [*_joined(map(_values, map(mapping, modules)))]


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))


def _readers(own: dict[str, Any]) -> tuple[Reader, Reader]:
    """Return what reads the plain attributes of a module, and those of other types."""
    names = [name for name in own if name not in INTERNAL]
    plain = [name for name in names if type(own[name]) in PLAIN_TYPES]
    return _reader(plain), _reader([name for name in names if name not in plain])


def _reader(names: list[str]) -> Reader:
    # Of a single name, an itemgetter would return no tuple.
    return itemgetter(*names, names[0]) if names else lambda _: ()
