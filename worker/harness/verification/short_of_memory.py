"""Tells where memory ran out: in the check of a plan, which the script has no part in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autofit.worker.oom.classifier import Kind, classify
from autofit.worker.records.trials import CHECK_STARVED

NOTE = f"autofit: {CHECK_STARVED}"


@contextmanager
def checking() -> Iterator[None]:
    """Within it autofit checks a plan by calls of its own: mark shortages that leave it."""
    try:
        yield
    except Exception as error:
        if classify(error).kind is Kind.OOM and not in_check(error):
            error.add_note(NOTE)
        raise


def in_check(error: BaseException) -> bool:
    """Return whether an error came out of a check."""
    return NOTE in getattr(error, "__notes__", ())
