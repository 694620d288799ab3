"""What ``checkpoint=`` names, copied to the host before a call and put back before a retry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils._pytree import tree_map

from autofit.exceptions import UsageError


@runtime_checkable
class Stateful(Protocol):
    """A model, an optimizer, a schedule: anything whose state can be taken and set."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> Any:
        """Set the state."""


class Checkpoint:
    """The states of some objects at one moment; tensors are kept in host memory."""

    def __init__(self, objects: Iterable[Stateful]) -> None:
        """Copy the states now; raise ``UsageError`` for an object without a state."""
        self._kept: list[tuple[Stateful, Any]] = []
        for each in objects:
            if not isinstance(each, Stateful):
                raise UsageError(
                    f"checkpoint= names {type(each).__name__}, which has no state_dict and"
                    " load_state_dict: name models, optimizers and schedules"
                )
            self._kept.append((each, tree_map(_copied, each.state_dict())))

    def restore(self) -> None:
        """Set every object back to its kept state; gradients go."""
        for each, state in self._kept:
            each.load_state_dict(tree_map(_copied, state))
            if isinstance(each, torch.nn.Module):
                each.zero_grad(set_to_none=True)


def named(checkpoint: object, arguments: Mapping[str, Any]) -> list[Any]:
    """Return the objects that ``checkpoint`` means: themselves, or names of arguments."""
    several = isinstance(checkpoint, (list, tuple))
    asked = list(checkpoint) if isinstance(checkpoint, (list, tuple)) else [checkpoint]
    assert several or len(asked) == 1
    found = []
    for each in asked:
        if not isinstance(each, str):
            found.append(each)
        elif each in arguments:
            found.append(arguments[each])
        else:
            raise UsageError(f"checkpoint= names {each!r}, and the function has no such argument")
    return found


def _copied(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf
