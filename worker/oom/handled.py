"""Decides whether an error was raised because of the one that was being handled. Imports no torch.

Python sets ``__context__`` of every error that is raised while another is handled. Two opposite
cases look alike. A wrapper may report the failure in its own words without ``from``. Or a bug in
the handler raises an error that has nothing to do with the failure.
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
"""Types that a bug in the program raises; nobody reports a lack of memory with them."""


def because(error: BaseException, handled: BaseException) -> bool:
    """Return whether ``error``, whose ``__context__`` is ``handled``, was raised because of it.

    Each of these is evidence:

    - ``error`` quotes the message of ``handled``, carries its traceback, or is a ``SystemExit``
      with a code other than 0.
    - No ``except`` block had caught ``handled``. It passed through a ``finally`` or a ``with``
      block whose clean-up failed.
    - A ``raise`` statement in the ``except`` block itself made ``error``, and its type is none of
      ``MISTAKES``. If an operation or a called function raised it, that is its reason instead.
    """
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    message = formatted(handled).partition("\n")[0].partition(": ")[2]
    if message and message in formatted(error):
        return True
    caught, entries = handled.__traceback__, [*_entries(error.__traceback__)]
    if caught is None:
        return False
    if caught in entries:
        return True
    entry = next((each for each in entries if each.tb_frame is caught.tb_frame), None)
    if entry is None:  # ``error`` has not reached the frame that handles
        return False
    if not _in_except(entry):
        return True
    return entry.tb_next is None and _raises(entry) and not isinstance(error, MISTAKES)


def raised_in_python(error: BaseException) -> bool | None:
    """Return whether a ``raise`` statement raised ``error``, rather than C code.

    ``None`` if unknown.
    """
    entry = error.__traceback__
    if entry is None:
        return None
    *_, last = _entries(entry)
    return _raises(last)


def formatted(error: BaseException) -> str:
    """Return ``Type: message`` as Python prints it, also if the user's ``__str__`` fails.

    Python prints the place of a syntax error before its message; here the place follows.
    """
    if type(error) in (SyntaxError, IndentationError, TabError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception_only(error)).strip()


def _entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _raises(entry: TracebackType) -> bool:
    code = entry.tb_frame.f_code.co_code  # empty for frames that Cython makes
    return code[entry.tb_lasti : entry.tb_lasti + 1] == bytes([RAISE])


def _in_except(entry: TracebackType) -> bool:
    """Return whether a line is inside an ``except`` block; ``True`` if there is no source."""
    frame = entry.tb_frame
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return True
    blocks = [each for each in ast.walk(tree) if isinstance(each, ast.ExceptHandler)]
    within = (b for b in blocks if b.lineno <= entry.tb_lineno <= (b.end_lineno or b.lineno))
    return not lines or any(within)
