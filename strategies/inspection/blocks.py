"""Finds a model's repeated blocks, for checkpointing and regional compilation.

The Python export copies these functions into its program.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of ``model`` in the order of their registration.

    A block has submodules and parameters, and its class occurs at least twice outside other blocks.
    Containers are no blocks, but ``Sequential`` modules with equal parts count as one class. The
    only member of a ``ModuleList`` is a block too, because it may run several times: ALBERT's
    layers share their parameters. Blocks of one or two layers, such as a convolution and its norm,
    are ignored if larger blocks have most layers.
    """
    blocks = list(dict.fromkeys(outermost(model, block_kinds(model))))
    large = [each for each in blocks if layers(each) >= 3]
    return large if 2 * sum(map(layers, large)) > sum(map(layers, blocks)) else blocks


def block_kinds(module: nn.Module, opened: frozenset[Any] = frozenset()) -> set[Any]:
    """Return the kinds of the blocks in ``module``. A block may be inside the ``opened`` kinds.

    A kind that occurs once is opened, that of the largest module first.
    """
    every = {kind_of(each) for each in module.modules()} - {None}
    kinds: dict[Any, list[nn.Module]] = {}
    for each in dict.fromkeys(outermost(module, every - opened)):
        kinds.setdefault(kind_of(each), []).append(each)
    lists = lists_of(module)
    single = [each for each, *more in kinds.values() if not more and not alone(lists.get(each))]
    if single:
        return block_kinds(module, opened | {kind_of(max(single, key=layers))})
    return set().union(*(smaller(alike, lists) or {kind} for kind, alike in kinds.items()))


def smaller(alike: list[nn.Module], lists: dict[nn.Module, nn.Module]) -> set[Any]:
    """Return the kinds of the blocks inside the modules ``alike`` that replace them, if any.

    The blocks of a stage replace the stage, and those of two towers the towers. They are in lists,
    and have three layers or more. The other layers of a stage are fewer than those of one block. A
    layer with experts has more of them: its attention. In modules outside of containers, such as
    towers, the other layers must be the minority.
    """
    inside = [part for each in alike for part in outermost(each, block_kinds(each))]
    kinds = {kind_of(part) for part in inside if part in lists and layers(part) >= 3}
    inside = [part for each in alike for part in outermost(each, kinds)]
    if len(inside) <= len(alike):
        return set()
    sizes = [layers(part) for part in inside]
    others = sum(map(layers, alike)) - sum(sizes)
    contained = any(each in lists and is_container(lists[each]) for each in alike)
    return kinds if others < (len(alike) * max(sizes) if contained else sum(sizes)) else set()


def outermost(module: nn.Module, kinds: Container[Any]) -> Iterator[nn.Module]:
    """Yield the modules of these kinds in ``module``, but none inside another."""
    for child in module.children():
        yield from [child] if kind_of(child) in kinds else outermost(child, kinds)


def kind_of(module: nn.Module) -> Any:
    """Return a key that is equal for modules of one kind; ``None`` if they cannot be blocks."""
    from torch import nn

    parts = [type(child) for child in module.children()]
    listed = isinstance(module, nn.Sequential)
    holds = is_container(module) and not listed
    if holds or len(parts) <= listed or not any(True for _ in module.parameters()):
        return None
    return (type(module), *(parts if listed else ()))


def lists_of(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return each member of a list in ``module`` with what holds it.

    This is a container, or a module whose children are of one kind.
    """
    found = {}
    for each in module.modules():
        if is_container(each) or len({kind_of(child) for child in each.children()}) == 1:
            found.update(dict.fromkeys(each.children(), each))
    return found


def is_container(module: nn.Module) -> bool:
    """Return whether ``module`` is a container of torch's."""
    from torch import nn

    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def alone(holder: nn.Module | None) -> bool:
    """Return whether the holder is a ``ModuleList`` of one."""
    from torch import nn

    return isinstance(holder, nn.ModuleList) and len(list(holder.children())) == 1


def layers(module: nn.Module) -> int:
    """Return the number of modules in ``module`` that have parameters of their own."""
    return sum(any(True for _ in each.parameters(recurse=False)) for each in module.modules())
