"""Tensors that stand for outputs of a call, whose entries are computed when something uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


class DelayedOutput(torch.Tensor):
    """An output of a call whose entries are computed when something uses them."""

    def value(self) -> torch.Tensor:
        """Return the actual tensor, with its graph."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute the output for calls that bypass Python; its own node passes on the gradients."""
        args, kwargs = tree_map(
            lambda each: each.value().detach() if isinstance(each, DelayedOutput) else each,
            (tuple(args), kwargs or {}),
        )
        return func(*args, **kwargs)


def materialize(value: Any, kind: type[DelayedOutput] = DelayedOutput) -> Any:
    """Return ``value`` with the actual tensors in the place of delayed outputs."""
    if not any(isinstance(leaf, kind) for leaf in tree_leaves(value)):
        return value
    return tree_map(lambda each: each.value() if isinstance(each, kind) else each, value)
