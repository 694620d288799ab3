"""A parsed launch line, and messages about its unused options. Imports no torch."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.exceptions import UsageError

MEETING = "not used, autofit connects the ranks on this machine and chooses the port"
RESTARTS = "not used, `autofit run` restarts a script only if memory runs out or its plan fails"
CARDS = "not used, --gpus sets the number of GPUs, CUDA_VISIBLE_DEVICES which ones"
OURS = "not used, autofit starts the ranks itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A parsed launch line."""

    target: str
    module: bool
    args: tuple[str, ...]
    ranks: int
    environment: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def given(parser: ArgumentParser, said: Namespace) -> set[str]:
    """Return the names of the options in ``said`` that differ from the defaults of ``parser``."""
    defaults = vars(parser.parse_args(["script"]))
    return {name for name, value in vars(said).items() if value != defaults.get(name)}


def unused(said: set[str], reasons: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for each reason, with the given options that are not used for that reason."""
    grouped: dict[str, list[str]] = {}
    for name in sorted(said & set(reasons)):
        grouped.setdefault(reasons[name], []).append(option(name))
    return tuple(f"{', '.join(names)}: {reason}" for reason, names in grouped.items())


def option(name: str) -> str:
    """Return the option with this name as on a command line: ``--`` and hyphens."""
    return "--" + name.replace("_", "-")


def refuse(said: Any, name: str, why: str) -> None:
    """Raise ``UsageError`` if an option is set that autofit does not support."""
    if said:
        raise UsageError(f"{option(name)}: {why}")
