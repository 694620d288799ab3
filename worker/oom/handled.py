"""Was an error raised because of the one that was being handled? Imports no torch.

Python sets ``__context__`` of whatever is raised while another error is handled. Two opposite
cases look alike in it: a wrapper that reports the failure in its own words without ``from``, and a
bug that has nothing to do with the failure, in code that had already dealt with it.
"""

from __future__ import annotations

import ast
import dis
import linecache
import traceback
from collections.abc import Iterator
from types import TracebackType

RAISE = dis.opmap["RAISE_VARARGS"]

MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    SyntaxError,
    TypeError,
)
"""What a mistake in the program raises; nobody reports a shortage of memory as one of these."""


def because(error: BaseException, handled: BaseException) -> bool:
    """Return whether ``error``, whose ``__context__`` is ``handled``, was raised because of it.

    Any of these is taken as evidence:

    - ``error`` quotes the message of ``handled`` or carries its traceback, or it ends the program
      with a code that is not 0;
    - nobody had handled ``handled``: it was on its way through a ``finally`` or a ``with`` block
      when the clean-up failed, and would have ended the program otherwise;
    - a ``raise`` statement in the ``except`` block itself made ``error``, of a type that does not
      stand for a mistake in the program. An error that an operation made, or a function that the
      block called (a second attempt, say), tells of that operation or function.
    """
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    if (words := _words(handled)) and words in formatted(error):
        return True
    caught, way = handled.__traceback__, [*_entries(error.__traceback__)]
    if caught is None:
        return False
    if caught in way:
        return True
    entry = next((each for each in way if each.tb_frame is caught.tb_frame), None)
    if entry is None:  # it has not come as far as the block that handles
        return False
    if not _in_except(entry):
        return True
    return entry.tb_next is None and _raises(entry) and not isinstance(error, MISTAKES)


def raised_in_python(error: BaseException) -> bool | None:
    """Return whether a ``raise`` statement made ``error``, not C code; ``None`` if unknown."""
    entry = error.__traceback__
    if entry is None:
        return None
    *_, last = _entries(entry)
    return _raises(last)


def formatted(error: BaseException) -> str:
    """Return ``Type: message`` as Python shows it, also where the user's ``__str__`` fails."""
    return "".join(traceback.format_exception_only(error)).strip()


def _words(error: BaseException) -> str:
    return formatted(error).partition("\n")[0].partition(": ")[2]


def _entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _raises(entry: TracebackType) -> bool:
    code = entry.tb_frame.f_code.co_code  # empty for frames that Cython makes up
    return code[entry.tb_lasti : entry.tb_lasti + 1] == bytes([RAISE])


def _in_except(entry: TracebackType) -> bool:
    """Return whether a line is inside an ``except`` block; assumed where there is no source."""
    frame = entry.tb_frame
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return True
    blocks = [each for each in ast.walk(tree) if isinstance(each, ast.ExceptHandler)]
    within = (b for b in blocks if b.lineno <= entry.tb_lineno <= (b.end_lineno or b.lineno))
    return not lines or any(within)
