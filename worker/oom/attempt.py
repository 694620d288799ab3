"""Runs work for which memory may be too small, and tells the caller whether it was.

It frees what the frames of an error hold, such as the tensors of a call that did not fit.

The caller decides what to do next outside the ``except`` block. That matters: inside it, the
traceback would keep alive the tensors that did not fit.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from traceback import clear_frames
from types import FrameType, FunctionType
from typing import Generic, TypeVar, cast

from autofit.exceptions import Refused
from autofit.worker.oom.classifier import ErrorKind, classify

T = TypeVar("T")

_survived = 0
"""Out-of-memory errors of this process after which the training went on."""
_HERE = 3
"""References to an object that only its owner holds: the owner's, a variable's, the question's."""


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


def free_frames(error: BaseException) -> None:
    """Drop the local variables of the frames that ``error`` and its causes have left.

    ``traceback.clear_frames`` leaves what a frame's function has enclosed. torch calls a module
    that has hooks through such a function, so the module's arguments and their graph would stay.
    The tracebacks can still be printed. Frames that still run keep their variables.
    """
    for each in _chain(error):
        trace = each.__traceback__
        clear_frames(trace)
        while trace is not None:
            _clear_closures(trace.tb_frame)
            trace = trace.tb_next


def _chain(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        group = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        behind = (each.__cause__, each.__context__, *group)
        waiting += [one for one in behind if one is not None]


def _clear_closures(frame: FrameType) -> None:
    """Empty the cells that nothing can read any more: only the frame's own function has them."""
    for each in gc.get_referents(frame):
        if not isinstance(each, FunctionType) or sys.getrefcount(each) > _HERE + 1:
            continue  # the list of referents is one reference more
        for cell in each.__closure__ or ():
            if sys.getrefcount(cell) <= _HERE:
                with suppress(ValueError):  # empty already
                    del cell.cell_contents


def survived_errors() -> int:
    """Return the out-of-memory errors of this process so far after which the training went on."""
    return _survived


def count_survived() -> None:
    """Count one error after which the training goes on.

    ``autofit run`` and ``@autofit.resilient`` count; the callbacks of ``autofit.integrations`` log
    the number. One number a process is enough, because one training runs there.
    """
    global _survived
    _survived += 1
