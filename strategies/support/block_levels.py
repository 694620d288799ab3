"""Levels that are numbers of repeated blocks: ``Number.BLOCKS``. Imports no torch."""

from __future__ import annotations

import math

from autofit.facts import Facts
from autofit.strategies.base import AS_IS

ALL = "all"
"""The level of all blocks."""


def count(level: str, blocks: int) -> int:
    """Return how many of ``blocks`` blocks run again under a level other than ``auto``."""
    if level == AS_IS:
        return 0
    return blocks if level == ALL else min(int(level), blocks)


def level_of(number: int, blocks: int) -> str:
    """Return the level under which ``number`` of ``blocks`` blocks run again."""
    return AS_IS if number == 0 else ALL if number >= blocks else str(number)


def more_blocks(level: str | None, other: str | None) -> bool:
    """Return whether ``level`` checkpoints more blocks than ``other``; ``False`` if unknown."""

    numbers = {AS_IS: 0.0, ALL: math.inf}

    def number(level: str | None) -> float:
        return float(level) if level and level.isdecimal() else numbers.get(level or "", math.nan)

    return number(level) > number(other)


def most_blocks(facts: Facts) -> int:
    """Return the blocks of the root that has most of them; 0 if none are known."""
    return max((root.blocks for root in facts.roots), default=0)
