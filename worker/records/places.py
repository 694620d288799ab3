"""A line of source code, as records hold it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A line of the user's own code, or of a package."""

    line: str
    """File and line number: ``"train.py:41"``, or ``"transformers/trainer.py:4127"``."""
    source: str = ""
    """The text of the line."""
