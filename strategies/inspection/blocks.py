"""Finds a model's repeated blocks, for checkpointing and regional compilation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


NEARLY_ALL = 0.9
"""If inner blocks hold this share of a child's parameters, they replace the child."""


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of ``model`` in the order of their registration.

    These are the blocks in its lists. If there are none, they are repeated children of one class,
    as in a U-Net. There two ``Sequential`` modules with equal parts count as one class. If a child
    consists nearly only of such blocks, these are returned and not the child. Blocks inside a block
    are ignored. If nothing is repeated, the result is the only block of a list, which may run
    several times: ALBERT's layers share their parameters.
    """
    found = listed_blocks(model) or list(dict.fromkeys(_one_by_one(model)))
    return found or list(dict.fromkeys(_alone(model)))


def listed_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that ``model`` has in lists.

    They are two or more children of one class in a ``ModuleList`` or ``Sequential``. The list may
    be the model itself. Each block needs submodules: a bare linear layer has nothing to recompute.
    If no list consists of blocks only, the blocks are the most frequent class in a list, between
    stem and head.
    """
    found = list(_in_lists(model, _all_alike)) or list(_in_lists(model, _most_alike))
    return list(dict.fromkeys(found))


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
    kinds = Counter(kind for child in module.children() if (kind := _kind(child)))
    for child in module.children():
        inside = list(_one_by_one(child))
        repeated = kinds[_kind(child)] > 1
        if repeated and _parameters(*inside) < NEARLY_ALL * _parameters(child):
            yield child
        else:
            yield from inside


def _all_alike(members: list[nn.Module]) -> list[nn.Module]:
    """Return the members of a list of blocks; none if it contains anything else."""
    blocks = _most_alike(members)
    return blocks if len(blocks) == len(members) else []


def _most_alike(members: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks in a list if most members have their class."""
    if len(members) < 2:
        return []
    kind, count = Counter(type(member) for member in members).most_common(1)[0]
    blocks = [member for member in members if type(member) is kind]
    most = count >= 2 and 2 * count > len(members)
    return blocks if most and all(_composite(block) for block in blocks) else []


def _alone(module: nn.Module) -> Iterator[nn.Module]:
    """Yield blocks that are the only member of a list."""
    from torch import nn

    members = list(module.children())
    if isinstance(module, nn.ModuleList) and len(members) == 1 and _composite(members[0]):
        yield members[0]
        return
    for child in members:
        yield from _alone(child)


def _composite(module: nn.Module) -> bool:
    from torch import nn

    listed = isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
    return not listed and bool(_kind(module))


def _kind(module: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return a key that is equal for modules of one kind.

    The key is empty for modules without submodules or weights. A ``Sequential`` of one module is
    not a block of its own.
    """
    from torch import nn

    inside = tuple(type(child) for child in module.children())
    several = len(inside) > isinstance(module, nn.Sequential)
    holds = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if holds or not several or not _parameters(module):
        return ()
    return (type(module), *inside) if isinstance(module, nn.Sequential) else (type(module),)


def _parameters(*modules: nn.Module) -> int:
    return sum(1 for module in modules for _ in module.parameters())
