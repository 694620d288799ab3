"""Runs autofit's own work so that it can never end the script.

A model's arguments, attributes and outputs come from any library, and some raise when they are
read. The harness leaves such objects as they are.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def beside(work: Callable[[], T], otherwise: T, lost: str) -> T:
    """Return the result of ``work``; if it fails, warn about ``lost`` and return ``otherwise``.

    For facts, notes and traces, which the script's training does not need.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
        line = (str(error).splitlines() or [""])[0]
        with contextlib.suppress(Warning):  # the script may have turned warnings into errors
            warnings.warn(f"autofit: {lost}: {type(error).__name__}: {line}", stacklevel=2)
        return otherwise
