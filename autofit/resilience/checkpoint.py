"""Saves the states that ``checkpoint=`` names before a call, and restores them before a retry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils._pytree import tree_map

from autofit.exceptions import UsageError


@runtime_checkable
class Stateful(Protocol):
    """A model, an optimizer, a scheduler: an object with ``state_dict``."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> Any:
        """Set the state."""


class Checkpoint:
    """The states of some objects at one moment; copies of their tensors are in host memory."""

    def __init__(self, objects: Iterable[Stateful]) -> None:
        """Copy the states now; raise ``UsageError`` for an object without a state."""
        self._saved: list[tuple[Stateful, Any]] = []
        for each in objects:
            if not isinstance(each, Stateful):
                raise UsageError(
                    f"checkpoint= names {type(each).__name__}, which has no state_dict and"
                    " load_state_dict: name models, optimizers and schedulers"
                )
            self._saved.append((each, tree_map(_copied, each.state_dict())))

    def restore(self) -> None:
        """Load the saved state into every object; set the gradients of modules to ``None``."""
        for each, state in self._saved:
            each.load_state_dict(tree_map(_copied, state))
            if isinstance(each, torch.nn.Module):
                each.zero_grad(set_to_none=True)


def objects_of(checkpoint: object, arguments: Mapping[str, Any]) -> list[Any]:
    """Return the objects in ``checkpoint``; strings in it are names of ``arguments``.

    Raises ``UsageError`` for a name that is no argument.
    """
    wanted = list(checkpoint) if isinstance(checkpoint, (list, tuple)) else [checkpoint]
    found = []
    for each in wanted:
        if not isinstance(each, str):
            found.append(each)
        elif each in arguments:
            found.append(arguments[each])
        else:
            raise UsageError(f"checkpoint= names {each!r}, and the function has no such argument")
    return found


def _copied(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf
