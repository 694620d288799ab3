"""Exports the best plan: one module for each format, ``as_<name>``, and one line in ``FORMATS``.

A format's module is imported when it writes: ``autofit --help`` lists the names only.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from autofit.exceptions import UsageError

if TYPE_CHECKING:
    from autofit.analysis.result import Result

FORMATS = (
    "accelerate",
    "deepspeed",
    "env",
    "json",
    "lightning",
    "patch",
    "python",
    "toml",
    "torchrun",
    "trainer",
)
"""The names of the formats."""

SUFFIXES: Mapping[str, str] = {
    ".env": "env",
    ".json": "json",
    ".patch": "patch",
    ".py": "python",
    ".sh": "torchrun",
    ".toml": "toml",
}
"""The format for the suffix of a file's name."""


def render(form: str, result: Result, *, partial: bool = False) -> str:
    """Return ``result`` in the format ``form``, one of ``FORMATS``; it ends in a newline.

    Raises ``UsageError`` if the format cannot carry the whole plan. With ``partial`` the text
    leaves out what the format cannot carry, and names it.
    """
    if not partial and (left := lost(form, result)):
        raise UsageError(
            f"--format {form} cannot carry {', '.join(left)}; add --partial to leave that out,"
            " or choose --format torchrun, which carries every plan"
        )
    text: str = importlib.import_module(f"{__name__}.as_{form}").render(result)
    return text


def lost(form: str, result: Result) -> tuple[str, ...]:
    """Return the strategies of the plan that ``form`` cannot carry, each with its level.

    A format's module has a function ``carried(result)`` that returns the names of the strategies
    that it carries. A module without this function carries every plan.
    """
    module = importlib.import_module(f"{__name__}.as_{form}")
    if not hasattr(module, "carried"):
        return ()
    names = module.carried(result)
    return tuple(f"{name} {level}" for name, level in result.plan.changes if name not in names)
