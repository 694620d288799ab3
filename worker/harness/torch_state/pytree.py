"""Flattens a model's arguments and outputs, including dataclasses and ``UserDict``.

torch's pytree takes an object of an unknown class for one value. Registering the script's classes
with torch would change what the script sees. So this module wraps such objects into a node class of
its own, and rebuilds objects of the original class.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch.utils._pytree import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_map,
)

Context = tuple[type, tuple[str, ...]]


class _Unpacked:
    """An object's class with the names and values of its attributes."""

    __slots__ = ("cls", "names", "values")

    def __init__(self, cls: type, names: tuple[str, ...], values: Sequence[Any]) -> None:
        self.cls = cls
        self.names = names
        self.values = values


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of ``value`` and the spec for ``tree_unflatten``."""
    leaves, spec = tree_flatten(value)
    if any(map(_is_unpackable, leaves)):
        with suppress(Exception):  # an object that cannot be unpacked stays one value
            return tree_flatten(_unpack_all(value))
    return leaves, spec


def _unpack_all(value: Any) -> Any:
    return tree_map(_unpack, value)


def _is_unpackable(leaf: Any) -> bool:
    is_data = dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, dict))
    return is_data or isinstance(leaf, UserDict)


def _unpack(leaf: Any) -> Any:
    if not _is_unpackable(leaf):
        return leaf
    if hasattr(leaf, "__dict__"):
        names = tuple(vars(leaf))
    else:
        fields = (each.name for each in dataclasses.fields(leaf))
        names = tuple(name for name in fields if hasattr(leaf, name))
    return _Unpacked(type(leaf), names, [_unpack_all(getattr(leaf, name)) for name in names])


def _close(values: Sequence[Any], context: Context) -> Any:
    cls, names = context
    made: Any = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _parts(opened: _Unpacked) -> tuple[list[Any], Context]:
    return list(opened.values), (opened.cls, opened.names)


register_pytree_node(_Unpacked, _parts, _close)  # type: ignore[arg-type]
