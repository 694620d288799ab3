"""What a launcher's line says, and which of its options are not used. Imports no torch."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.exceptions import UsageError

MEETING = "not used, the ranks meet on this machine, on a port of autofit's choice"
RESTARTS = "not used, `autofit run` starts again what ran out of memory, and nothing else"
CARDS = "not used, --gpus says how many cards are used, CUDA_VISIBLE_DEVICES which"
OURS = "not used, autofit starts the ranks itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What one launch line says."""

    target: str
    module: bool
    args: tuple[str, ...]
    ranks: int
    environment: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def given(parser: ArgumentParser, said: Namespace) -> set[str]:
    """Return the names of the options in ``said`` that differ from what ``parser`` has without."""
    without = vars(parser.parse_args(["script"]))
    return {name for name, value in vars(said).items() if value != without.get(name)}


def unused(said: set[str], reasons: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for each reason why some of the options ``said`` are not used."""
    grouped: dict[str, list[str]] = {}
    for name in sorted(said & set(reasons)):
        grouped.setdefault(reasons[name], []).append(option(name))
    return tuple(f"{', '.join(names)}: {reason}" for reason, names in grouped.items())


def option(name: str) -> str:
    """Return how an option with this name is written on a command line."""
    return "--" + name.replace("_", "-")


def refuse(said: Any, name: str, why: str) -> None:
    """Raise ``UsageError`` where an option is set that cannot be honoured."""
    if said:
        raise UsageError(f"{option(name)}: {why}")
