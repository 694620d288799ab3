"""Small, linear summaries of gradients, so that two ways to compute them can be compared.

A gradient is folded into at most ``BUCKETS`` sums. Folding is linear: the chunks' digests add up to
the digest of the whole, and comparing two needs no second copy of the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import get_gradient_edge

BUCKETS = 4096

Digest = list[torch.Tensor]
"""One float64 vector a parameter, of at most ``BUCKETS`` entries."""


def digest(
    outputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
) -> Digest:
    """Return the digest of the parameters' gradients; ``.grad`` and its hooks see nothing."""
    # Asked for tensors, torch.autograd.grad leaves the torch-function modes for its duration, and
    # what checkpointing recomputes meanwhile would draw again; asked for graph edges, it does not.
    gradients = torch.autograd.grad(
        [get_gradient_edge(output) for output in outputs],
        [get_gradient_edge(parameter) for parameter in parameters],
        cotangents,
        allow_unused=True,
    )
    return [
        torch.zeros(1, dtype=torch.float64, device=parameter.device)
        if gradient is None
        else fold(gradient)
        for gradient, parameter in zip(gradients, parameters, strict=True)
    ]


def fold(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` folded into at most ``BUCKETS`` float64 sums."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= BUCKETS:
        return flat.to(torch.float64)
    whole = flat.numel() // BUCKETS * BUCKETS
    folded = flat[:whole].view(-1, BUCKETS).sum(0, dtype=torch.float64)
    folded[: flat.numel() - whole] += flat[whole:]
    return folded


def difference(found: Digest, expected: Digest) -> float:
    """Return the largest relative difference of a parameter's gradient.

    Relative to the gradient's own norm, or to a tenth of the mean norm where that is larger: some
    gradients are zero but for rounding (the bias of attention keys). ``inf`` for NaN.
    """
    norms = torch.stack([vector.norm() for vector in expected])
    floor = max(float(norms.mean()) * 0.1, torch.finfo(torch.float64).tiny)
    worst = 0.0
    for one, other, norm in zip(found, expected, norms.tolist(), strict=True):
        shape = max(one.numel(), other.numel())
        distance = float((one.expand(shape) - other.expand(shape)).norm()) / max(norm, floor)
        if not distance <= worst:
            worst = distance if distance == distance else float("inf")
    return worst


def mean_difference(found: Digest, expected: Digest) -> float:
    """Return the relative difference of all gradients together; ``inf`` for NaN."""
    square = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    norm = sum(float(b.square().sum()) for b in expected)
    if norm == 0.0:
        return 0.0 if square == 0.0 else float("inf")
    relative = (square / norm) ** 0.5
    return relative if relative == relative else float("inf")
