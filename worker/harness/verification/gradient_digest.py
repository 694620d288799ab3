"""Small, linear summaries of gradients, so that two ways to compute them can be compared.

A gradient is folded into at most ``BUCKETS`` sums. Folding is linear: the chunks' digests add up to
the digest of the whole, and comparing two needs no second copy of the gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge

BUCKETS = 4093
"""A prime: in as many sums as a layer has inputs each would be over all of its outputs, and those
of a gradient that a normalisation sent back add up to zero; what is left is rounding."""

ROWS, PIECES = 16, 16
"""A gradient is folded in so many pieces, of no fewer rows of ``BUCKETS``."""

NOTABLE = 0.01
"""Share of the norm of all gradients that a parameter's own has to have for its size to count."""
ENTRIES = 64
"""That a digest has to have for its norm to say something of it."""

Digest = list[torch.Tensor]
"""One float64 vector a parameter, of at most ``BUCKETS`` entries."""


def digest(
    outputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
) -> Digest:
    """Return the digest of the parameters' gradients; ``.grad`` and its hooks see nothing.

    Each is folded as it comes, and freed: they never exist all at once.
    """
    found: dict[int, torch.Tensor] = {}

    def taken(index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:  # a function in the graph had none to give
            return None
        found[index] = fold(gradient)
        return None if gradient.is_sparse else gradient.new_zeros(()).expand_as(gradient)

    for device in {output.device for output in outputs}:
        _begin_backward(device)
    hooks = [p.register_hook(partial(taken, n)) for n, p in enumerate(parameters)]
    # Asked for tensors, torch.autograd.grad leaves the torch-function modes for its duration, and
    # what checkpointing recomputes meanwhile would draw again; asked for graph edges, it does not.
    try:
        torch.autograd.grad(
            [get_gradient_edge(output) for output in outputs],
            [get_gradient_edge(parameter) for parameter in parameters],
            cotangents,
            allow_unused=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    return [
        found[index]
        if index in found
        else torch.zeros(1, dtype=torch.float64, device=parameter.device)
        for index, parameter in enumerate(parameters)
    ]


@functools.cache
def _begin_backward(device: torch.device) -> None:
    """Let the thread that runs backward on a GPU take up its context.

    Where cuBLAS is the first to want one there, as in a backward that begins at a linear layer,
    torch warns the user of it.
    """
    if device.type == "cuda":
        with torch.enable_grad():
            one = torch.ones((), device=device, requires_grad=True)
            torch.autograd.grad([get_gradient_edge(one.exp())], [get_gradient_edge(one)])


def fold(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` folded into at most ``BUCKETS`` float64 sums; imaginary parts follow."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        return _fold_sparse(tensor.coalesce())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.reshape(-1)
    if flat.numel() <= BUCKETS:
        return flat.to(torch.float64)
    whole = flat.numel() // BUCKETS * BUCKETS
    rows = flat[:whole].view(-1, BUCKETS)
    # In pieces: a sum in another type begins with a copy in that type, twice as large here.
    pieces = rows.split(max(ROWS, -(-len(rows) // PIECES)))
    folded: torch.Tensor = pieces[0].sum(0, dtype=torch.float64)
    for piece in pieces[1:]:
        folded += piece.sum(0, dtype=torch.float64)
    folded[: flat.numel() - whole] += flat[whole:]
    return folded


def _fold_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """Fold what a sparse gradient holds; the whole would be as large as the weights."""
    values = tensor.values().reshape(tensor._nnz(), -1)
    size = min(BUCKETS, tensor.numel())
    places = torch.zeros(tensor._nnz(), dtype=torch.long, device=tensor.device)
    for index, length in zip(tensor.indices(), tensor.shape[: tensor.sparse_dim()], strict=True):
        places = places * length + index
    entries = places[:, None] * values.shape[1] + torch.arange(
        values.shape[1], device=tensor.device
    )
    folded = torch.zeros(size, dtype=torch.float64, device=tensor.device)
    return folded.index_add_(0, (entries % size).reshape(-1), values.reshape(-1).double())


def differences(found: Sequence[Digest], expected: Digest) -> list[float]:
    """Return the relative difference of each parameter's gradient; ``inf`` for NaN.

    ``found``: of the parts, to be added up. Relative to the norm of the largest among the gradient
    and its parts (parts that cancel leave their rounding behind), or to a tenth of the mean norm
    where that is larger: some gradients are zero but for rounding (the bias of attention keys).
    """
    norms = torch.stack([vector.norm() for vector in expected])
    floor = max(float(norms.mean()) * 0.1, torch.finfo(torch.float64).tiny)
    relative = []
    for parts, whole in zip(zip(*found, strict=True), expected, strict=True):
        shape = max(vector.numel() for vector in (*parts, whole))
        total = sum(part.expand(shape) for part in parts)
        scale = max(*(float(vector.norm()) for vector in (*parts, whole)), floor)
        distance = float((total - whole.expand(shape)).norm()) / scale
        relative.append(distance if distance == distance else float("inf"))
    return relative


def coefficients(
    pieces: Sequence[Digest], expected: Digest
) -> tuple[list[float], list[float], float]:
    """Return how often each piece counts in ``expected``, by least squares.

    With the standard error of each, and what is left of ``expected``, relative to it; ``inf`` where
    a number is not finite. Each piece counts once where that explains as much as anything does.
    """
    columns = torch.stack([_in_one(piece, expected) for piece in pieces], dim=1)
    whole = _in_one(expected, pieces[0])
    rest, norm = whole - columns.sum(1), float(whole.norm())
    if not (math.isfinite(norm) and bool(torch.isfinite(columns).all())):
        return [], [], math.inf
    if norm == 0.0:
        return [], [], 0.0 if float(rest.norm()) == 0.0 else math.inf
    more = torch.linalg.lstsq(columns, rest[:, None], driver="gelsd").solution[:, 0]
    left = float((columns @ more - rest).norm())
    free = max(1, int(columns.any(1).sum()) - len(more))
    spread = torch.linalg.pinv(columns.T @ columns).diagonal().clamp(min=0.0).sqrt()
    errors = spread * left / free**0.5
    return (1.0 + more).tolist(), errors.tolist(), left / norm


def _in_one(found: Digest, like: Digest) -> torch.Tensor:
    """Return a digest as one vector on the host; zeros where it has no gradient."""
    sizes = [max(a.numel(), b.numel()) for a, b in zip(found, like, strict=True)]
    return torch.cat([v.expand(n).cpu() for v, n in zip(found, sizes, strict=True)])


def mean_difference(found: Digest, expected: Digest) -> float:
    """Return the relative difference of all gradients together; ``inf`` for NaN."""
    square = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    norm = sum(float(b.square().sum()) for b in expected)
    if norm == 0.0:
        return 0.0 if square == 0.0 else float("inf")
    relative = (square / norm) ** 0.5
    return relative if relative == relative else float("inf")


def largest_factor(found: Digest, expected: Digest) -> float:
    """Return by how much norms differ: of all gradients together, or of a parameter that counts.

    A factor, 1 or more: that of the larger to the smaller. A parameter counts whose gradient is a
    notable part of all: lost it is ``inf``, and so is what is not finite; of few entries no more is
    looked at, since the norm is chance where the direction is.
    """
    norms = [(float(a.norm()), float(b.norm())) for a, b in zip(found, expected, strict=True)]
    together = math.hypot(*(mine for mine, _ in norms)), math.hypot(*(other for _, other in norms))
    if not all(map(math.isfinite, together)):
        return math.inf
    counting = [
        (mine, other)
        for (mine, other), entries in zip(norms, expected, strict=True)
        if other > NOTABLE * together[1] and (len(entries) >= ENTRIES or mine == 0.0)
    ]
    pairs = [sorted(pair) for pair in (together, *counting)]
    return max(large / small if small else math.inf for small, large in pairs)


def pattern(like: torch.Tensor, dim: int, first: int) -> torch.Tensor:
    """Return a fixed incoming gradient for rows ``first`` and on: smooth, none alike.

    A product of waves, one for each dimension: no more memory than ``like`` has.
    """
    real = torch.ones(like.shape, dtype=like.dtype.to_real(), device=like.device)
    for axis, size in enumerate(like.shape):
        places = torch.arange(size, device=like.device, dtype=torch.float64)
        wave = (
            torch.sin(1.0 + first + places) if axis == dim else torch.cos((1 + axis / 8) * places)
        )
        shape = [1] * like.ndim
        shape[axis] = size
        real *= wave.to(real.dtype).view(shape)
    return torch.complex(real, 1.0 - real) if like.is_complex() else real
