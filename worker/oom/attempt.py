"""Runs work for which memory may be too small, and tells the caller whether it was.

The caller decides what to do next outside the ``except`` block. That matters: inside it, the
traceback would keep alive the tensors that did not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from traceback import clear_frames
from typing import Generic, TypeVar, cast

from autofit.worker.oom.classifier import Kind, classify

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What ``attempt`` came to: a value, or the shortage of memory that prevented it."""

    value: T | None = None
    shortage: Exception | None = None
    """The error that reported the shortage. Its frames are cleared: they hold no tensor."""

    @property
    def fits(self) -> bool:
        """Whether memory was large enough."""
        return self.shortage is None

    def result(self) -> T:
        """Return the value; raise the shortage if there was one."""
        if self.shortage is not None:
            raise self.shortage
        return cast(T, self.value)


def attempt(run: Callable[[], T], *, corroborated: Callable[[], bool] | None = None) -> Outcome[T]:
    """Return the outcome of ``run``; raise any error that is not a shortage of memory.

    ``corroborated``: asked after an error whether the device is nearly full. A yes makes an error
    that only looks like a shortage count as one.

    >>> outcome = attempt(lambda: model(batch))
    >>> if not outcome.fits:
    ...     output = model_in_chunks(batch)
    """
    try:
        return Outcome(run())
    except Exception as error:
        if not is_shortage(error, corroborated):
            raise
        clear_frames(error.__traceback__)
        return Outcome(shortage=error)


def is_shortage(error: BaseException, corroborated: Callable[[], bool] | None = None) -> bool:
    """Return whether memory ran out; ``corroborated`` as in ``attempt``."""
    full = corroborated is not None and corroborated()
    return classify(error, corroborated=full).kind is Kind.OOM
