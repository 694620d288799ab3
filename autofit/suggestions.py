"""Suggests the known name that a misspelt one may stand for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALIKE = 0.5
"""Similarity, from 0 to 1, from which a name is suggested (``difflib.SequenceMatcher.ratio``)."""


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``word`` may stand for; ``None`` if no name is like it.

    A name that begins with ``word``, or that ``word`` begins with, comes before similar ones.

    >>> closest("checkpoint", ["precision", "checkpointing"])
    'checkpointing'
    >>> closest("persicion", ["precision", "checkpointing"])
    'precision'
    """
    names = {name.lower(): name for name in known}
    lower = word.lower()
    begins = [
        name for name in names if lower and (name.startswith(lower) or lower.startswith(name))
    ]
    similar = difflib.get_close_matches(lower, begins or names, n=1, cutoff=0 if begins else ALIKE)
    return names[similar[0]] if similar else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"did you mean 'precision'?"``; an empty text if no known name is like ``word``."""
    name = closest(word, known)
    return "" if name is None else f"did you mean {name!r}?"
