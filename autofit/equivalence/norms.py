"""Norms and differences of the sketches in a trace. Imports no torch.

A sketch is a short linear digest of a vector, made by the harness's ``fingerprint.py``.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from dataclasses import dataclass


def unpack(text: str) -> array[float]:
    """Return the sums in a base64-encoded sketch."""
    sums = array("f", base64.b64decode(text))
    if sys.byteorder == "big":
        sums.byteswap()
    return sums


@dataclass(frozen=True, slots=True)
class Pair:
    """Squared norms of a found vector, of the expected vector, and of their difference."""

    found: float
    """Square of the norm of the found vector."""
    expected: float
    """Square of the norm of the expected vector."""
    distance: float
    """Square of the norm of the difference."""

    def __add__(self, other: Pair) -> Pair:
        return Pair(
            self.found + other.found,
            self.expected + other.expected,
            self.distance + other.distance,
        )

    @property
    def finite(self) -> bool:
        """Whether no entry of the found vector is NaN or infinite."""
        return math.isfinite(self.found)

    @property
    def norm(self) -> float:
        """Norm of the expected vector."""
        return math.sqrt(self.expected)

    @property
    def apart(self) -> float:
        """Norm of the difference."""
        return math.sqrt(self.distance)

    @property
    def relative(self) -> float:
        """Norm of the difference divided by that of the expected vector; ``inf`` if that is 0."""
        if self.expected == 0.0:
            return 0.0 if self.distance == 0.0 else math.inf
        return math.sqrt(self.distance / self.expected)

    @property
    def ratio(self) -> float:
        """Norm of the found vector divided by that of the expected one; 1 if both are zero."""
        if self.expected == 0.0:
            return 1.0 if self.found == 0.0 else math.inf
        return math.sqrt(self.found / self.expected)


NOTHING = Pair(0.0, 0.0, 0.0)


def pairs(found: str, expected: str, buckets: int) -> list[Pair]:
    """Return a pair for each row of two sketches; a row has ``buckets`` sums.

    Raises ``ValueError`` if the sketches differ in length.
    """
    ours, theirs = unpack(found), unpack(expected)
    if len(ours) != len(theirs):
        raise ValueError(f"sketches of {len(ours)} and {len(theirs)} sums")
    rows = range(0, len(ours), buckets)
    return [_pair(ours[row : row + buckets], theirs[row : row + buckets]) for row in rows]


def _pair(found: array[float], expected: array[float]) -> Pair:
    return Pair(
        sum(x * x for x in found),
        sum(x * x for x in expected),
        sum((x - y) * (x - y) for x, y in zip(found, expected, strict=True)),
    )


def total(found: list[Pair]) -> Pair:
    """Return the sum of all rows, which describes the concatenated vectors."""
    return sum(found, NOTHING)
