"""Options of a command as fields of a dataclass: one list for Python and for the command line.

A field with a ``Flag`` is an option. ``autofit/cli/types.py`` makes Click's option from it, and
``autofit/api/values.py`` reads its value from Python. Imports neither torch nor the strategies, so
that ``autofit --help`` is quick.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields
from enum import StrEnum
from typing import Any

PREFERENCES = ("fidelity", "memory", "speed")
"""Which of the plans that are as fast as the fastest is chosen.

The one that changes least, the one with the lowest peak, or the fastest.
"""


class ValueKind(StrEnum):
    """How the value of an option is written."""

    SIZE = "bytes, such as 24GiB"
    DURATION = "seconds, such as 1h30m"
    COUNT = "a number from 1"
    PERCENT = "a number from 0, below 100"
    FIDELITY = "the name of a fidelity"
    PREFERENCE = "one of the preferences"
    STRATEGIES = "names of techniques, one for each option"
    TEXT = "any text"
    SWITCH = "no value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """The option of the command line that sets a field."""

    help: str
    kind: ValueKind
    metavar: str | None = None
    show_default: bool = False
    required: bool = False


def flag(
    help: str,
    kind: ValueKind,
    metavar: str | None = None,
    *,
    show_default: bool = False,
    required: bool = False,
) -> dict[str, Flag]:
    """Return the metadata of a field that is an option."""
    made = Flag(help=help, kind=kind, metavar=metavar, show_default=show_default, required=required)
    return {"flag": made}


def flags_of(options: type) -> Iterator[tuple[Field[Any], Flag]]:
    """Yield each field that is an option of the command line, in the order of ``--help``."""
    for each in fields(options):
        if "flag" in each.metadata:
            yield each, each.metadata["flag"]


def flag_name(name: str) -> str:
    """Return the option for a field: ``--gpus-per-trial`` for ``gpus_per_trial``."""
    return "--" + name.replace("_", "-")


def default_of(each: Field[Any]) -> Any:
    """Return the default of a field; ``None`` if it has none."""
    if each.default_factory is not MISSING:
        return each.default_factory()
    return None if each.default is MISSING else each.default
