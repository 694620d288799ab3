"""Does anything of a forward outlive its output? Then a split batch would not be the same.

A loss kept in an attribute of the model, features stored by a hook: the script uses them beside the
output, and under a split they would come from one part of the batch. Nor may the forward use
tensors from elsewhere that need gradients: the split knows of the parameters and arguments only.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autofit.exceptions import Refused
from autofit.strategies.base import Forward
from autofit.worker.harness.joining import Batch


class _Saved:
    """A tensor that a graph holds."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def refuse_escapes(batch: Batch, forward: Forward, parameters: Iterable[torch.Tensor]) -> None:
    """Run ``forward`` once; raise ``Refused`` when it leaves part of a graph, or uses another."""
    saved: list[weakref.ref[_Saved]] = []

    def pack(tensor: torch.Tensor) -> _Saved:
        holder = _Saved(tensor.detach())  # the tensor itself would hold its graph, in a circle
        saved.append(weakref.ref(holder))
        return holder

    args, kwargs = batch.call(batch.leaves)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        output = forward(*args, **kwargs)
    own = {id(parameter) for parameter in parameters}
    foreign = any(id(leaf) not in own for leaf in _graph_leaves(tree_leaves(output)))
    del output
    if any(each() is not None for each in saved):
        gc.collect()
    if any(each() is not None for each in saved):
        raise Refused("the model keeps a part of its forward (an attribute, a hook) for later")
    if foreign:
        raise Refused("the model uses tensors that need gradients and are not its parameters")


def _graph_leaves(outputs: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the leaves of the autograd graph behind some tensors."""
    todo = [out.grad_fn for out in outputs if isinstance(out, torch.Tensor) and out.grad_fn]
    seen = set(todo)
    while todo:
        node = todo.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
