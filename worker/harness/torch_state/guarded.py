"""Work that is done beside the script's own, which it must never be able to end.

What a model is given, holds and returns comes from any library: it may refuse to be looked at. What
the harness cannot look at it leaves as it is.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def beside(work: Callable[[], T], otherwise: T, lost: str) -> T:
    """Return what ``work`` does; ``otherwise`` where it fails, and warn of what is ``lost``.

    For what the script's training does not depend on: facts, notes, traces.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
        line = (str(error).splitlines() or [""])[0]
        with contextlib.suppress(Warning):  # the script may have turned warnings into errors
            warnings.warn(f"autofit: {lost}: {type(error).__name__}: {line}", stacklevel=2)
        return otherwise
