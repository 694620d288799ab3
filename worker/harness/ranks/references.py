"""Replaces objects in everything that refers to them, such as the script's lists of parameters."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from types import CellType, FrameType
from typing import Any

import torch
from torch import nn

from autofit.exceptions import Refused
from autofit.strategies import SHARDING

STALE = "the script uses a parameter that it stored in a variable before the weights were sharded"


class StaleParameter(nn.Parameter):
    """A parameter that another has replaced. A variable of a function may still hold it."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise ``Refused``, because its values are old."""
        raise Refused(STALE, SHARDING)


def replace_parameters(new: Mapping[nn.Parameter, torch.Tensor]) -> None:
    """Put the new parameters in place of the old ones, wherever the script keeps these.

    Lists, tuples, dictionaries, sets, attributes and closures are followed. Variables of functions
    that run cannot be changed: to use the parameter in one raises ``Refused``. So does an object of
    another kind that holds a parameter, before anything has changed.
    """
    gc.collect()  # cycles that nothing refers to hold parameters too, such as those of an error
    replaced: dict[int, tuple[Any, Any]] = {id(old): (old, each) for old, each in new.items()}
    ours = {id(replaced), id(new), *map(id, replaced.values())}
    wave: list[Any] = list(new)
    while wave:
        ours.add(id(wave))
        tuples = []
        for holder in gc.get_referrers(*wave):
            if id(holder) in ours or id(holder) in replaced or isinstance(holder, FrameType):
                continue
            if isinstance(holder, tuple):
                values = [_new(each, replaced) for each in holder]
                named = getattr(type(holder), "_make", None)
                changed = (named or type(holder))(values)
                pair = holder, changed
                replaced[id(holder)] = pair
                ours |= {id(pair), id(changed)}
                tuples.append(holder)
            else:
                _replace(holder, replaced)
        wave = tuples
    drop_values(new)
    for old in new:
        old.grad = None
        old.__class__ = StaleParameter


def drop_values(parameters: Iterable[torch.Tensor]) -> None:
    """Free the memory of parameters that others replace."""
    for each in parameters:
        each.data = torch.empty(0, dtype=each.dtype, device=each.device)


def _new(value: Any, replaced: Mapping[int, tuple[Any, Any]]) -> Any:
    old, new = replaced.get(id(value), (None, None))
    return new if old is value else value


def _replace(holder: Any, replaced: Mapping[int, tuple[Any, Any]]) -> None:
    """Replace the old objects in one that holds some."""
    if isinstance(holder, list):
        holder[:] = [_new(each, replaced) for each in holder]
    elif isinstance(holder, dict):
        items = [(_new(k, replaced), _new(v, replaced)) for k, v in holder.items()]
        if any(a is not b for (a, _), b in zip(items, holder, strict=True)):
            holder.clear()
        holder.update(items)
    elif isinstance(holder, set):
        values = [_new(each, replaced) for each in holder]
        holder.clear()
        holder.update(values)
    elif isinstance(holder, CellType):
        holder.cell_contents = _new(holder.cell_contents, replaced)
    elif hasattr(holder, "__dict__") and any(
        id(each) in replaced for each in vars(holder).values()
    ):
        _replace(vars(holder), replaced)
    else:
        raise Refused(f"a {type(holder).__name__} of the script holds a parameter", SHARDING)
