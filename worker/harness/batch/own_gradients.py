"""Gradients for which the script calls ``torch.autograd.grad``, through calls in chunks.

The parameters of a split root are no inputs of its node in the script's graph, so autograd finds no
way to them. Here autograd computes the gradients of the root's outputs, and the chunks run again
from these, for the parameters in question alone. Their ``.grad`` does not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from autofit.exceptions import Refused
from autofit.strategies import SPLIT
from autofit.worker.harness.batch.chunk_runs import sum_of
from autofit.worker.harness.batch.chunked_call import CREATE_GRAPH, ChunkedCall
from autofit.worker.harness.patching.observers import plain_grad
from autofit.worker.harness.torch_state.graph import edges_of, walk

VECTORIZED = "the script asks for several gradients at once (is_grads_batched)"


def gradients_through_chunks(
    outputs: Any, inputs: Any, options: Mapping[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    """Return what ``torch.autograd.grad`` would return if no call had run in chunks.

    ``options``: the other arguments of that function. Raises ``Refused`` for gradients that are to
    be differentiated again.
    """
    if options.get("create_graph"):
        raise Refused(CREATE_GRAPH, SPLIT)
    if options.get("is_grads_batched"):
        raise Refused(VECTORIZED, SPLIT)
    asked, wanted = as_tuple(outputs), as_tuple(inputs)
    nodes = ((node, getattr(node, "call", None)) for node, _ in walk(edges_of(asked), set()))
    calls = {node: call for node, call in nodes if isinstance(call, ChunkedCall)}
    edges = [GradientEdge(node, i) for node, call in calls.items() for i in range(call.tracked)]
    found: list[torch.Tensor | None] = [
        *plain_grad(
            asked,
            [*wanted, *edges],
            options.get("grad_outputs"),
            retain_graph=True,
            allow_unused=True,
        )
    ]
    incoming = iter(found[len(wanted) :])
    total = found[: len(wanted)]
    for node, call in calls.items():
        cotangents = [next(incoming) for _ in range(call.tracked)]
        own = {id(parameter) for parameter in call.parameters}
        positions = [i for i, each in enumerate(wanted) if id(each) in own]
        if not positions or all(each is None for each in cotangents):
            continue
        saved: Any = partial(getattr, node, "saved_tensors")
        parts = call.gradients_of([wanted[i] for i in positions], cotangents, saved)
        for i, part in zip(positions, parts, strict=True):
            total[i] = sum_of(total[i], part)
    return _as_torch_returns(asked, wanted, total, options)


def _as_torch_returns(
    outputs: tuple[Any, ...],
    inputs: tuple[Any, ...],
    found: list[torch.Tensor | None],
    options: Mapping[str, Any],
) -> tuple[torch.Tensor | None, ...]:
    """Treat inputs that no output depends on as torch does."""
    missing = [each for each, gradient in zip(inputs, found, strict=True) if gradient is None]
    if options.get("materialize_grads"):
        pairs = zip(inputs, found, strict=True)
        return tuple(torch.zeros_like(each) if g is None else g for each, g in pairs)
    if missing and not options.get("allow_unused"):  # it raises torch's own error
        plain_grad(outputs, missing, options.get("grad_outputs"), retain_graph=True)
    return tuple(found)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the tensors that were given as one tensor or as a sequence."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
