"""Frees what the frames of an error hold, such as the tensors of a call that did not fit."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import suppress
from traceback import clear_frames
from types import FrameType, FunctionType

_HERE = 3
"""References to an object that only its owner holds: the owner's, a variable's, the question's."""


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
