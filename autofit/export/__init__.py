"""Exports the best plan: one module for each format, ``as_<name>``, and one line in ``FORMATS``.

A format's module is imported when it writes: ``autofit --help`` lists the names only.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from autofit.exceptions import UsageError

if TYPE_CHECKING:
    from autofit.analysis.result import Result
    from autofit.export.carried import Carried

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

    Raises ``UsageError`` if the format cannot carry the whole plan; the message says what to set by
    hand. With ``partial`` the text leaves out what the format cannot carry, and names it.
    """
    if not partial and (left := lost(form, result)):
        raise UsageError(
            f"--format {form} cannot carry {', '.join(left)}; add --partial to leave that out,"
            " or choose --format torchrun, which carries every plan"
        )
    text: str = _module(form).render(result)
    return text


def lost(form: str, result: Result) -> tuple[str, ...]:
    """Return the levels of the plan that ``form`` cannot carry, and how to set each by hand."""
    found = expressed(form, result)
    if found is None:
        return ()
    return tuple(
        f"{strategy.name} {level} ({found.told(strategy, level)})"
        for strategy, level in result.plan
        if not found.carries(strategy, level)
    )


def expressed(form: str, result: Result) -> Carried | None:
    """Return what ``form`` carries of the plan; ``None`` if it carries every plan.

    A format's module has a function ``settings`` that returns it. A module without this function
    carries every plan.
    """
    module = _module(form)
    found: Carried | None = module.settings(result) if hasattr(module, "settings") else None
    return found


def _module(form: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.as_{form}")
