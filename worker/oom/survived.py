"""Counts the out-of-memory errors of this process after which the training goes on.

``autofit run`` and ``@autofit.resilient`` add to the number; the callbacks of
``autofit.integrations`` log it. One number a process is enough, because one training runs there.
"""

from __future__ import annotations

_count = 0


def count() -> int:
    """Return the number so far."""
    return _count


def add() -> None:
    """Count one error."""
    global _count
    _count += 1
