"""A key for the arguments of a call, equal for calls that need the same memory. Imports torch."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autofit.resilience.arguments import Arguments

Key = tuple[object, ...]
"""Equal for calls that need the same memory, as far as the arguments show it."""

LONGEST = 256
"""Leaves of a list or dictionary that are part of the key, after its length."""

_sizes: WeakKeyDictionary[nn.Module, tuple[str, int]] = WeakKeyDictionary()


def key_of(arguments: Arguments) -> Key:
    """Return the shapes and dtypes of tensors, the sizes of models, integers and strings.

    Of other values only the type is part of the key: a learning rate does not change memory.
    """
    args, kwargs = arguments
    named = [(name, _part(kwargs[name])) for name in sorted(kwargs)]
    return (*(_part(each) for each in args), *named)


def digest(key: Key) -> str:
    """Return 64 hexadecimal digits; equal keys have the same digest in every process."""
    return hashlib.sha256(repr(key).encode()).hexdigest()


def _part(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype))
    if isinstance(value, (bool, int, str, type(None))):
        return value
    if isinstance(value, nn.Module):
        return _size_of(value)
    if isinstance(value, (list, tuple, dict)):
        leaves = tree_leaves(value)
        return (len(leaves), *(_part(leaf) for leaf in leaves[:LONGEST]))
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _size_of(module: nn.Module) -> tuple[str, int]:
    if (known := _sizes.get(module)) is None:
        size = sum(parameter.numel() for parameter in module.parameters())
        known = _sizes[module] = (type(module).__qualname__, size)
    return known
