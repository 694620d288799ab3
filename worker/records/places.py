"""A line of source code, as records hold it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A line of the user's own code."""

    line: str
    """File, as given to Python, and line number: ``"train.py:41"``."""
    source: str = ""
    """The text of the line."""
