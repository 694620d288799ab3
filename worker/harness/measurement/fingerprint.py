"""Small linear sketches of tensors, the same in every process and on every device.

A tensor is reduced to ``BUCKETS`` sums of its elements with pseudo-random signs (Charikar et al.,
2002, "Finding frequent items in data streams"). Sums without signs would lose information: the
gradients of a softmax add up to zero over its classes. A sketch is linear, so the sketch of a
change is the difference of two sketches and needs no copy of the tensor. Norms and angles of
sketches approximate those of the tensors: within some per cent for one row, and much more closely
for all rows together.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence

import torch

BUCKETS = 64
PIECE = 1 << 20
"""Elements reduced at a time. A sketch needs the memory of one copy of so many elements."""
AT_ONCE = 1 << 16
"""The same on the CPU, where a sum in float64 first copies its input to float64: 0.8 MiB."""
SHIFTS = 1 << 16
"""Offsets at which a piece may start in the signs, so that equal pieces get other signs."""
MOST_SUMS = 1 << 13
"""Sums in all rows of a packed table together: 32 KiB."""
MOST_ROWS = MOST_SUMS // 4


class Sketcher:
    """Computes sketches; holds the signs, one byte each."""

    def __init__(self) -> None:
        self._signs: dict[torch.device, torch.Tensor] = {}

    def fold(self, tensor: torch.Tensor, salt: int) -> torch.Tensor:
        """Return the sketch of ``tensor``: ``BUCKETS`` sums in float64, on its device.

        ``salt`` selects the signs. A tensor of up to ``BUCKETS`` elements keeps one element per
        sum.
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
    """Return the elements as one row: the values of a sparse tensor, the shard of a DTensor."""
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
    """Return how many neighbouring sketches share one row of a packed table."""
    return max(1, -(-rows // MOST_ROWS))


def shape_of(rows: int) -> tuple[int, int]:
    """Return the shape of the table in which ``rows`` sketches are packed: rows, sums a row."""
    packed = -(-rows // together(rows))
    buckets = BUCKETS
    while buckets * packed > MOST_SUMS:
        buckets //= 2
    return packed, buckets


def pack(sketches: Sequence[torch.Tensor]) -> str:
    """Return sketches as text: base64 of float32, in the shape that ``shape_of`` returns."""
    packed, buckets = shape_of(len(sketches))
    table = torch.zeros(packed * together(len(sketches)), BUCKETS, dtype=torch.float64)
    table[: len(sketches)] = torch.stack([sketch.cpu() for sketch in sketches])
    table = table.view(packed, -1, BUCKETS).sum(1)
    table = table.view(packed, -1, buckets).sum(1)
    raw = bytes(table.to(torch.float32).view(torch.uint8).flatten().tolist())
    return base64.b64encode(raw).decode()
