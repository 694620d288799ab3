"""Gradients that a script asks for by itself: ``torch.autograd.grad`` through a split root.

The engine cannot see the parameters of a root that runs in chunks: they hang on graphs of their
own, and what its backward finds lands in ``.grad``. So the calls are made to run by asking for
their anchors, and the gradients are taken out of ``.grad``, which gets back what it held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autofit.exceptions import Refused
from autofit.worker.harness.batch.chunked_call import ChunkedCall

UNUSED = (
    "The differentiated Tensor at index {} appears to not have been used in the graph. "
    "Set allow_unused=True if this is the desired behavior."
)
"""As torch says it."""


def transformed() -> bool:
    """Return whether a transform of ``torch.func`` is at work (``grad``, ``vmap``, ``jvp``)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def gradients(
    plain: Callable[..., Any],
    parameters: Sequence[nn.Parameter],
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Do what ``torch.autograd.grad`` does, which ``plain`` is, for roots that run in chunks.

    ``parameters``: all of those roots. Raises ``Refused`` where the gradients are to be
    differentiated or come in batches: a chunk's graph does not live that long.
    """
    if create_graph or is_grads_batched:
        reason = "the script differentiates gradients (create_graph) through the model"
        raise Refused(reason, "micro_batch")
    asked = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    own = {id(parameter) for parameter in parameters}
    aside = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        direct = plain(
            outputs,
            [*asked, *_anchors(outputs)],
            grad_outputs,
            retain_graph,
            allow_unused=True,
        )[: len(asked)]
        found = [
            _sum(gradient, each.grad if id(each) in own else None)
            for gradient, each in zip(direct, asked, strict=True)
        ]
    finally:
        for parameter, before in zip(parameters, aside, strict=True):
            parameter.grad = before
    if materialize_grads:
        return tuple(
            torch.zeros_like(each) if gradient is None else gradient
            for gradient, each in zip(found, asked, strict=True)
        )
    missing = [index for index, gradient in enumerate(found) if gradient is None]
    if missing and not allow_unused:
        raise RuntimeError(UNUSED.format(missing[0]))
    return tuple(found)


def _anchors(outputs: Any) -> list[torch.Tensor]:
    """Return the anchors of the calls that ``outputs`` come from."""
    sources = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    waiting = [output.grad_fn for output in sources]
    seen: set[Any] = set()
    found = []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        call = getattr(node, "call", None)
        if isinstance(call, ChunkedCall):
            found.append(call.anchor)
        waiting += [following for following, _ in node.next_functions]
    return found


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
