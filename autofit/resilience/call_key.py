"""What a call is called with, as far as its memory depends on it. Imports torch."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autofit.resilience.arguments import Arguments

Key = tuple[object, ...]
"""Equal for calls that need the same memory, as far as arguments can tell."""

LONGEST = 256
"""Leaves of an argument that are looked at; of a longer list its length counts and its head."""

_weights: WeakKeyDictionary[nn.Module, tuple[str, int]] = WeakKeyDictionary()


def key_of(arguments: Arguments) -> Key:
    """Return the shapes and types of tensors, the sizes of models, whole numbers and words.

    Other values count by their type alone: a learning rate takes no memory.
    """
    args, kwargs = arguments
    named = [(name, _seen(kwargs[name])) for name in sorted(kwargs)]
    return (*(_seen(each) for each in args), *named)


def digest(key: Key) -> str:
    """Return 64 hexadecimal digits, the same in every process for equal keys."""
    return hashlib.sha256(repr(key).encode()).hexdigest()


def _seen(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype))
    if isinstance(value, (bool, int, str, type(None))):
        return value
    if isinstance(value, nn.Module):
        return _of_module(value)
    if isinstance(value, (list, tuple, dict)):
        leaves = tree_leaves(value)
        return (len(leaves), *(_seen(leaf) for leaf in leaves[:LONGEST]))
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _of_module(module: nn.Module) -> tuple[str, int]:
    if (known := _weights.get(module)) is None:
        size = sum(parameter.numel() for parameter in module.parameters())
        known = _weights[module] = (type(module).__qualname__, size)
    return known
