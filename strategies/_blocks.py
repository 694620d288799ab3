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
    those between the stem and the head of a model in one ``Sequential``. Where no list has any,
    they are the children of one class that a module holds one by one, as a U-Net does its stages; a
    ``Sequential`` is then of the class of those with the same parts. Blocks inside a block are not
    looked for.
    """
    ways = _in_lists(model, _all_alike), _in_lists(model, _most_alike), _one_by_one(model)
    found = (list(dict.fromkeys(way)) for way in ways)
    return next((blocks for blocks in found if blocks), [])


def _in_lists(
    module: nn.Module, alike: Callable[[list[nn.Module]], list[nn.Module]]
) -> Iterator[nn.Module]:
    from torch import nn

    members = list(module.children())
    listed = isinstance(module, (nn.ModuleList, nn.Sequential))
    if listed and (blocks := alike(members)):
        yield from blocks
        return
    for child in members:
        yield from _in_lists(child, alike)


def _one_by_one(module: nn.Module) -> Iterator[nn.Module]:
    kinds = Counter(_kind(child) for child in module.children() if _has_parts(child))
    for child in module.children():
        if kinds[_kind(child)] > 1:
            yield child
        else:
            yield from _one_by_one(child)


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
    return _has_parts(module)


def _has_parts(module: nn.Module) -> bool:
    """Return whether a module runs several others, with parameters."""
    from torch import nn

    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # it runs nothing
        return False
    several = len(list(module.children())) > int(isinstance(module, nn.Sequential))
    return several and any(True for _ in module.parameters())


def _kind(module: nn.Module) -> tuple[type[nn.Module], ...]:
    from torch import nn

    inside = map(type, module.children()) if isinstance(module, nn.Sequential) else ()
    return (type(module), *inside)
