"""Reads a plan from an exported file, for ``autofit run --plan FILE``."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from autofit.exceptions import UsageError
from autofit.plan import Plan

PLAN = "plan"
"""The key of the plan in an exported document."""


def load_plan(path: Path) -> Plan:
    r"""Return the plan in ``path``, an export in JSON or TOML.

    Only the table ``plan`` is read, which maps strategies to levels. Other strategies stay at the
    script's own setting. Raises ``UsageError`` if the file cannot be read, or if this version of
    autofit does not know the plan.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "plan.toml")
    ...     _ = path.write_text('[plan]\nprecision = "bf16"')
    ...     print(load_plan(path))
    bf16
    """
    levels = _parsed(path).get(PLAN)
    if not isinstance(levels, dict) or not all(map(_is_level, levels.values())):
        raise UsageError(f"{str(path)!r} holds no plan: it needs a table {PLAN!r}, as exported")
    try:
        return Plan.of({name: str(level) for name, level in levels.items()})
    except (UsageError, ValueError) as error:
        raise UsageError(f"{str(path)!r}: {error}") from error


def _parsed(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is not text"
        raise UsageError(f"the plan {str(path)!r} cannot be read: {reason}") from error
    try:
        found = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (RecursionError, ValueError) as error:
        raise UsageError(
            f"{str(path)!r} is neither JSON nor TOML ({error}); "
            "write one with: autofit best --format json -o plan.json"
        ) from error
    return found if isinstance(found, dict) else {}


def _is_level(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)
