"""Exports the best plan: one module for each format, ``as_<name>``, and one line in ``FORMATS``.

A format's module is imported when it writes: ``autofit --help`` lists the names only.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autofit.analysis.result import Result

FORMATS = (
    "accelerate",
    "env",
    "json",
    "python",
    "toml",
    "torchrun",
    "trainer",
)
"""The names of the formats."""

SUFFIXES: Mapping[str, str] = {
    ".env": "env",
    ".json": "json",
    ".py": "python",
    ".sh": "torchrun",
    ".toml": "toml",
}
"""The format for the suffix of a file's name."""


def render(form: str, result: Result) -> str:
    """Return ``result`` in the format ``form``, one of ``FORMATS``; it ends in a newline."""
    text: str = importlib.import_module(f"{__name__}.as_{form}").render(result)
    return text
