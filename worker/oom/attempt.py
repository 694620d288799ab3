"""Runs work for which memory may be too small, and tells the caller whether it was.

The caller decides what to do next outside the ``except`` block. That matters: inside it, the
traceback would keep alive the tensors that did not fit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from autofit.exceptions import Refused
from autofit.worker.oom.classifier import ErrorKind, classify
from autofit.worker.oom.frames import free_frames

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AttemptOutcome(Generic[T]):
    """What ``attempt`` came to: a value, or the error that prevented it."""

    value: T | None = None
    shortage: Exception | None = None
    """The error that reported the shortage. Its frames are cleared: they hold no tensor."""
    failure: Exception | None = None
    """An error that is surely no shortage; only from ``attempt_model``. Its frames are cleared."""

    @property
    def fits(self) -> bool:
        """Whether memory was large enough."""
        return self.shortage is None

    def result(self) -> T:
        """Return the value; raise the error if there was one."""
        if (error := self.shortage or self.failure) is not None:
            raise error
        return cast(T, self.value)


def attempt(
    run: Callable[[], T], *, corroborated: Callable[[], bool] | None = None
) -> AttemptOutcome[T]:
    """Return the outcome of ``run``; raise any error that is not a shortage of memory.

    ``corroborated``: asked after an error whether the device is nearly full. A yes makes an error
    that only looks like a shortage count as one.

    >>> outcome = attempt(lambda: model(batch))
    >>> if not outcome.fits:
    ...     output = model_in_chunks(batch)
    """
    try:
        return AttemptOutcome(run())
    except Exception as error:
        if not is_shortage(error, corroborated):
            raise
        free_frames(error)
        gc.collect()  # what did not fit may hold itself, as a graph with hooks does
        return AttemptOutcome(shortage=error)


def attempt_model(run: Callable[[], T]) -> AttemptOutcome[T]:
    """Return the outcome of ``run``, which calls a model in a way that the model may not support.

    Unlike ``attempt``, this also returns errors of the model itself, as ``failure``. It raises
    ``Refused``, and errors that may or may not be a shortage of memory.
    """
    try:
        return AttemptOutcome(run())
    except Refused:
        raise
    except Exception as error:
        kind = classify(error).kind
        if kind not in (ErrorKind.OOM, ErrorKind.NOT_OOM):
            raise
        free_frames(error)
        gc.collect()
        return (
            AttemptOutcome(shortage=error)
            if kind is ErrorKind.OOM
            else AttemptOutcome(failure=error)
        )


def is_shortage(error: BaseException, corroborated: Callable[[], bool] | None = None) -> bool:
    """Return whether memory ran out; ``corroborated`` as in ``attempt``."""
    full = corroborated is not None and corroborated()
    return classify(error, corroborated=full).kind is ErrorKind.OOM
