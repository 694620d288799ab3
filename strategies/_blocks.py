"""Finds a model's repeated blocks: where checkpointing and regional compilation attach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of ``model`` in the order of their registration.

    Blocks are two or more children of one class in a ``ModuleList`` or ``Sequential``, which may be
    the model itself, each with submodules of its own (a list of bare linear layers has nothing
    inside to recompute). Blocks inside a block are not looked for.
    """
    return list(_walk(model))


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    from torch import nn

    members = list(module.children())
    if (
        isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(members) >= 2
        and len({type(member) for member in members}) == 1
        and all(_composite(member) for member in members)
    ):
        yield from members
        return
    for child in members:
        yield from _walk(child)


def _composite(module: nn.Module) -> bool:
    from torch import nn

    if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return False
    return any(True for _ in module.children()) and any(True for _ in module.parameters())
