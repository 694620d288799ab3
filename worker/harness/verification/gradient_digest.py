"""Linear digests of gradients, to compare two ways of computing them.

A gradient is folded into at most ``BUCKETS`` sums. Folding is linear, so the chunks' digests add up
to the batch's digest. The comparison needs no second copy of the gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge

from autofit.strategies.support.memory import on_accelerator

BUCKETS = 4093
"""The number is prime. If it were a layer's number of inputs, each sum would run over all outputs.
The sums of a gradient behind a normalization are zero up to rounding."""

ROWS, PIECES = 16, 16
"""A gradient is folded in ``PIECES`` pieces of at least ``ROWS`` rows of ``BUCKETS``."""

NOTABLE = 0.01
"""The norm of a parameter's gradient counts from this share of the norm of all gradients."""
ENTRIES = 64
"""A digest with fewer entries says too little by its norm."""

Digest = list[torch.Tensor]
"""One float64 vector for each parameter, of at most ``BUCKETS`` entries."""


def digest(
    outputs: list[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    *,
    through: Sequence[torch.Tensor] = (),
) -> Digest:
    """Return the digest of the parameters' gradients.

    The backward also runs towards ``through``, whose gradients are folded on the way.
    ``.grad`` does not change, and its hooks are not called. Each gradient is folded and freed at
    once, so the gradients never exist together. ``outputs`` is emptied: the graph of a language
    model does not need its logits.
    """
    found: dict[int, torch.Tensor] = {}

    def fold_and_drop(index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:  # a function in the graph returned none
            return None
        found[index] = fold(gradient)
        return None if gradient.is_sparse else gradient.new_zeros(()).expand_as(gradient)

    for device in {output.device for output in outputs}:
        _begin_backward(device)
    edges = [get_gradient_edge(output) for output in outputs]
    outputs.clear()
    hooks = [p.register_hook(partial(fold_and_drop, n)) for n, p in enumerate(parameters)]
    # For tensors, torch.autograd.grad leaves the torch-function modes, and a checkpointed block
    # would draw other numbers when it runs again. For graph edges, it does not leave them.
    try:
        torch.autograd.grad(
            edges,
            [get_gradient_edge(each) for each in (*parameters, *through)],
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
    """Let autograd's thread for a device start it: on a GPU, set its CUDA context.

    Otherwise cuBLAS may be the first to need it there, and torch warns.
    """
    if on_accelerator(device):
        with torch.enable_grad():
            one = torch.ones((), device=device, requires_grad=True)
            torch.autograd.grad([get_gradient_edge(one.exp())], [get_gradient_edge(one)])


def fold(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` folded into at most ``BUCKETS`` float64 sums.

    Real and imaginary parts alternate.
    """
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
    # In pieces: a sum in another data type starts with a copy, which is twice as large here.
    pieces = rows.split(max(ROWS, -(-len(rows) // PIECES)))
    folded: torch.Tensor = pieces[0].sum(0, dtype=torch.float64)
    for piece in pieces[1:]:
        folded += piece.sum(0, dtype=torch.float64)
    folded[: flat.numel() - whole] += flat[whole:]
    return folded


def _fold_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """Fold the values of a sparse gradient; a dense copy would be as large as the weights."""
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

    The digests in ``found`` are added up. The difference is relative to the largest norm among the
    gradient and its parts, because parts that cancel leave their rounding behind. The scale is at
    least a tenth of the mean norm: some gradients are zero up to rounding, such as that of the bias
    of attention keys.
    """
    norms = [_norms(each) for each in (*found, expected)]
    floor = max(sum(norms[-1]) / len(norms[-1]) * 0.1, torch.finfo(torch.float64).tiny)
    apart = _norms([sum(parts) - w for *parts, w in zip(*found, expected, strict=True)])
    scales = [max(*each, floor) for each in zip(*norms, strict=True)]
    relative = [distance / scale for distance, scale in zip(apart, scales, strict=True)]
    return [each if each == each else float("inf") for each in relative]


def _norms(vectors: Sequence[torch.Tensor]) -> list[float]:
    """Return the norm of each vector; the device is waited for once."""
    if not vectors:
        return []
    norms = torch._foreach_norm(list(vectors))
    together: list[float] = torch.stack([each.to(norms[0].device) for each in norms]).tolist()
    return together


def coefficients(
    pieces: Sequence[Digest], expected: Digest
) -> tuple[list[float], list[float], float]:
    """Return each piece's coefficient in ``expected`` by least squares.

    Also returns the standard error of each, and the relative norm of the residual; ``inf`` if a
    number is not finite. The coefficients are 1 if that explains as much as any others do.
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


def length(gradients: Digest) -> float:
    """Return the norm of a digest, of all its parameters together."""
    return math.hypot(*_norms(gradients))


def _in_one(found: Digest, like: Digest) -> torch.Tensor:
    """Return a digest as one vector on the host; zeros for missing gradients."""
    sizes = [max(a.numel(), b.numel()) for a, b in zip(found, like, strict=True)]
    return torch.cat([v.expand(n).cpu() for v, n in zip(found, sizes, strict=True)])


def mean_difference(found: Digest, expected: Digest) -> float:
    """Return the relative difference of all gradients together; ``inf`` for NaN."""
    apart, norm = length([a - b for a, b in zip(found, expected, strict=True)]), length(expected)
    if norm == 0.0:
        return 0.0 if apart == 0.0 else float("inf")
    relative = apart / norm
    return relative if relative == relative else float("inf")


def largest_factor(found: Digest, expected: Digest) -> float:
    """Return the largest ratio of norms, at least 1: of all gradients together or of a parameter's.

    A parameter's gradient counts if it is a notable part of all gradients. The ratio is ``inf`` if
    such a gradient is zero or a norm is not finite. Digests of few entries do not count: if
    rounding decides their direction, it decides their norm as well.
    """
    norms = [*zip(_norms(found), _norms(expected), strict=True)]
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
    """Return a fixed incoming gradient for rows ``first`` and following.

    It is smooth, and no two of its rows are equal. It is a product of one wave for each dimension,
    so it needs no more memory than ``like``.
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
