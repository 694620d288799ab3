"""Text of others, as a terminal may have it; and the known name that a misspelt one stands for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Control characters of both sets, line and paragraph separators, marks that turn the direction of
# writing, and halves of surrogates, which no stream can encode.
_ACTS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, *, keep: str = "") -> str:
    r"""Return ``text`` with what acts on a terminal written out: ``"\x1b"`` becomes ``"\\x1b"``.

    Colours go without a trace. ``keep``: characters that stay, such as ``"\n"`` for several lines.
    """
    plain = _COLOUR.sub("", text)

    def written(found: re.Match[str]) -> str:
        character = found[0]
        return character if character in keep else character.encode("unicode_escape").decode()

    return _ACTS.sub(written, plain)


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
    """Return ``"did you mean 'precision'?"``; an empty text if no known name is like ``word``.

    >>> did_you_mean("persicion", ["precision", "checkpointing"])
    "did you mean 'precision'?"
    """
    name = closest(word, known)
    return "" if name is None else f"did you mean {name!r}?"
