"""Small, linear summaries of tensors, the same in every process and on every device.

A tensor is folded into ``BUCKETS`` sums of its elements with pseudo-random signs (Charikar et al.,
2002, "Finding frequent items in data streams"): plain sums would not do, since the gradients of a
softmax add up to zero over its classes. Folding is linear, so the sketch of a change is the
difference of two sketches and needs no copy of the tensor; norms and angles of sketches are those
of the tensors, within some per cent for one row and far less for all rows together.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence

import torch

BUCKETS = 64
PIECE = 1 << 20
"""Elements folded at a time: what a sketch needs in memory is a copy of so many."""
AT_ONCE = 1 << 16
"""The same on the CPU, where a sum in float64 makes a copy in float64 first: 0.8 MiB."""
SHIFTS = 1 << 16
"""Places in the signs at which a piece may begin, so that like pieces get unlike signs."""
MOST_SUMS = 1 << 13
"""Sums that all rows of a packed sketch have together: 32 KiB."""
MOST_ROWS = MOST_SUMS // 4


class Sketcher:
    """Folds tensors; holds the signs, a byte each, until it is dropped."""

    def __init__(self) -> None:
        self._signs: dict[torch.device, torch.Tensor] = {}

    def fold(self, tensor: torch.Tensor, salt: int) -> torch.Tensor:
        """Return the ``BUCKETS`` float64 sums of ``tensor``, on its device.

        ``salt`` picks the signs; tensors of up to ``BUCKETS`` elements keep each element apart.
        """
        flat = _flat(tensor)
        sums = torch.zeros(BUCKETS, dtype=torch.float64, device=flat.device)
        signs = self._signs_for(flat)
        size = AT_ONCE if flat.device.type == "cpu" else PIECE
        for number, start in enumerate(range(0, flat.numel(), PIECE)):
            piece = flat[start : start + PIECE]
            shift = (salt * 40_503 + number * 9_973) % SHIFTS
            own = signs[shift : shift + piece.numel()]
            for part, some in zip(piece.split(size), own.split(size), strict=True):
                signed = part * some
                whole = part.numel() // BUCKETS * BUCKETS
                sums += signed[:whole].view(-1, BUCKETS).sum(0, dtype=torch.float64)
                sums[: part.numel() - whole] += signed[whole:]
        return sums

    def _signs_for(self, flat: torch.Tensor) -> torch.Tensor:
        needed = min(PIECE, flat.numel()) + SHIFTS
        known = self._signs.get(flat.device)
        if known is None or known.numel() < needed:
            drawn = bytearray(random.Random(0).randbytes(needed))
            bits = torch.frombuffer(drawn, dtype=torch.uint8)
            known = ((bits & 1).to(torch.int8) * 2 - 1).to(flat.device)
            self._signs[flat.device] = known
        return known


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in a row: of a sparse tensor its values, of a sharded one its shard."""
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    if tensor.layout is not torch.strided:
        tensor = (
            tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
        )
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.float64)
    return tensor.reshape(-1)


def together(rows: int) -> int:
    """Return how many neighbouring sketches share a row."""
    return max(1, -(-rows // MOST_ROWS))


def shape_of(rows: int) -> tuple[int, int]:
    """Return into how many rows, of how many sums each, that many sketches are packed."""
    packed = -(-rows // together(rows))
    buckets = BUCKETS
    while buckets * packed > MOST_SUMS:
        buckets //= 2
    return packed, buckets


def pack(sketches: Sequence[torch.Tensor]) -> str:
    """Return sketches as text: base64 of float32, in the shape that ``shape_of`` says."""
    packed, buckets = shape_of(len(sketches))
    table = torch.zeros(packed * together(len(sketches)), BUCKETS, dtype=torch.float64)
    table[: len(sketches)] = torch.stack([sketch.cpu() for sketch in sketches])
    table = table.view(packed, -1, BUCKETS).sum(1)
    table = table.view(packed, -1, buckets).sum(1)
    raw = bytes(table.to(torch.float32).view(torch.uint8).flatten().tolist())
    return base64.b64encode(raw).decode()
