"""Finds a model's repeated blocks: where checkpointing and regional compilation attach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of ``model`` in the order of their registration.

    Blocks are two or more children of one class in a ``ModuleList`` or ``Sequential``, which may be
    the model itself, each with submodules of its own (a list of bare linear layers has nothing
    inside to recompute). Where no list has blocks alone, they are what most members of one are:
    those between the stem and the head of a model in one ``Sequential``. Blocks inside a block are
    not looked for.
    """
    return list(_walk(model, _all_alike)) or list(_walk(model, _most_alike))


def _walk(
    module: nn.Module, alike: Callable[[list[nn.Module]], list[nn.Module]]
) -> Iterator[nn.Module]:
    from torch import nn

    members = list(module.children())
    listed = isinstance(module, (nn.ModuleList, nn.Sequential))
    if listed and (blocks := alike(members)):
        yield from blocks
        return
    for child in members:
        yield from _walk(child, alike)


def _all_alike(members: list[nn.Module]) -> list[nn.Module]:
    """Return the members of a list of blocks; none where it is not one."""
    blocks = _most_alike(members)
    return blocks if len(blocks) == len(members) else []


def _most_alike(members: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks among the members of a list, where most are of one class."""
    if len(members) < 2:
        return []
    kind, count = Counter(type(member) for member in members).most_common(1)[0]
    blocks = [member for member in members if type(member) is kind]
    most = count >= 2 and 2 * count > len(members)
    return blocks if most and all(_composite(block) for block in blocks) else []


def _composite(module: nn.Module) -> bool:
    from torch import nn

    if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return False
    return any(True for _ in module.children()) and any(True for _ in module.parameters())
