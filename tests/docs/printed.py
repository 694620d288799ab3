"""Compares what a command prints with what a document says that it prints.

Figures differ from machine to machine, and so does the plan that is fastest. ``masked`` replaces
them, so that what remains has to be equal. In a document, ``...`` stands for any text within a
line, and for any lines as a line of its own.
"""

from __future__ import annotations

import re

from autofit.plan import Plan
from autofit.strategies import AS_IS, REGISTRY

_ANY_LINES = "(?:.*\n)*?"
_TIMES = "(?:ms|s|min|h|days?)"


def _levels() -> str:
    """Return a pattern of the names that levels have in a plan, the longest first."""
    levels = [(each.name, level.name) for each in REGISTRY for level in each.levels]
    names = {str(Plan.of({strategy: level})) for strategy, level in levels if level != AS_IS}
    names |= {str(Plan()), str(Plan.of({"micro_batch": "8"})), str(Plan.of({"checkpointing": "8"}))}
    patterns = (re.sub(r"\b\d+\b", r"\\d+", re.escape(name)) for name in names)
    patterns = (re.sub(r"blocks$", "blocks?", pattern) for pattern in patterns)
    return "|".join(sorted(patterns, key=len, reverse=True))


_LEVEL = _levels()
_MASKS = tuple(
    (re.compile(pattern, re.MULTILINE), replacement)
    for pattern, replacement in (
        (r"\x1b\[[\d;]*m", ""),  # colours
        (rf"\b(?:{_LEVEL})(?:, (?:{_LEVEL}))*\b", "PLAN"),
        (r"\b(?=\w*\d)[0-9a-f]{8}(?:-\d+)?\b", "ID"),
        (r"(?<=\d )#+>?", ""),  # the bar of a peak
        (r"(?<= )(?:new|now|~?[+-]\d+ %)(?= +[<>]? ?\d)", "CHANGE"),  # the column `vs now`
        (r"(?<!\S)(?:> |[~+<-])?(?=\d)|(?<=\d) ?±\d[\d.]*", ""),
        (r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?", "N"),
        (r"\bN (?:bytes|[KMGT]i?B)\b", "SIZE"),
        (rf"\bN {_TIMES}(?: N {_TIMES})*\b", "TIME"),
        (r"\bfits\b(?=  |\n| \().*", "fits"),  # what is noted about it depends on figures
        (r"(?<= in the search\)); .*", ""),  # why a run is slower, on a busy machine
        (r"[─━-]{2,}", "--"),
        (r"[ \t]+$", ""),
        (r"[ \t]+", " "),
    )
)


def masked(text: str) -> str:
    """Return a text without its figures, names of plans, identifiers, bars and columns."""
    for pattern, replacement in _MASKS:
        text = pattern.sub(replacement, text)
    return text.rstrip("\n") + "\n"


def is_printed(document: str, output: str) -> bool:
    """Return whether a command printed what a document says, figures aside."""
    lines = masked(document).splitlines()
    pattern = "".join(
        _ANY_LINES if line.strip() == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n"
        for line in lines
    )
    return re.fullmatch(pattern, masked(output)) is not None
