"""Marks shortages of memory that occur in autofit's own check of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autofit.worker.oom.classifier import ErrorKind, classify
from autofit.worker.records.trials import CHECK_STARVED

NOTE = f"autofit: {CHECK_STARVED}"


@contextmanager
def checking() -> Iterator[None]:
    """Mark a shortage that leaves this context: autofit's check caused it, not the script."""
    try:
        yield
    except Exception as error:
        if classify(error).kind is ErrorKind.OOM and not in_check(error):
            error.add_note(NOTE)
        raise


def in_check(error: BaseException) -> bool:
    """Return whether an error was raised in a check."""
    return NOTE in getattr(error, "__notes__", ())
