"""The options of a search: one dataclass for the Python API, the command line and ``--submit``.

A field with a ``Flag`` is an option of ``autofit search``. ``autofit/cli/types.py`` makes Click's
option from it, and ``command_line`` writes it back. Imports neither torch nor the strategies, so
that ``autofit --help`` is quick.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofit.strategies import Fidelity
    from autofit.worker.records.trials import Script


class Kind(StrEnum):
    """How the value of an option is written."""

    SIZE = "bytes, such as 24GiB"
    DURATION = "seconds, such as 1h30m"
    COUNT = "a number from 1"
    PERCENT = "a number from 0, below 100"
    FIDELITY = "the name of a fidelity"
    STRATEGIES = "names of strategies, one an option"
    TEXT = "any text"
    SWITCH = "no value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """The option of the command line that sets a field."""

    help: str
    kind: Kind
    metavar: str | None = None
    show_default: bool = False


def _flag(
    help: str, kind: Kind, metavar: str | None = None, *, show_default: bool = False
) -> dict[str, Flag]:
    return {"flag": Flag(help=help, kind=kind, metavar=metavar, show_default=show_default)}


def _rounding() -> Fidelity:
    from autofit.strategies import Fidelity

    return Fidelity.ROUNDING


def _horizon() -> int:
    from autofit.worker.records.trials import HORIZON

    return HORIZON


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The options of ``autofit.search``."""

    script: Script
    memory: int | None = field(
        default=None, metadata=_flag("Budget per device, such as 24GiB.", Kind.SIZE, "SIZE")
    )
    """Bytes per device; ``None`` for the bytes that the device has free."""
    allow: Fidelity = field(
        default_factory=_rounding,
        metadata=_flag(
            "The most a plan may change in the training; each includes those before it.",
            Kind.FIDELITY,
            show_default=True,
        ),
    )
    trials: int | None = field(
        default=None, metadata=_flag("End after so many trials.", Kind.COUNT)
    )
    """Trials in the study at which the search ends, those of earlier searches included."""
    timeout: float | None = field(
        default=None, metadata=_flag("End after 10m, 1h30m, ...", Kind.DURATION, "DUR")
    )
    """Seconds."""
    only: frozenset[str] = field(
        default=frozenset(),
        metadata=_flag("Try this strategy alone (repeatable).", Kind.STRATEGIES, "STRATEGY"),
    )
    without: frozenset[str] = field(
        default=frozenset(),
        metadata=_flag("Leave this strategy out (repeatable).", Kind.STRATEGIES, "STRATEGY"),
    )
    horizon: int = field(
        default_factory=_horizon,
        metadata=_flag(
            "Optimizer steps over which the time to compile is charged.",
            Kind.COUNT,
            "STEPS",
            show_default=True,
        ),
    )
    sampler: str = field(
        default="autofit",
        metadata=_flag(
            "What chooses the plans: autofit, tpe, gp, random, or module:Class of a sampler.",
            Kind.TEXT,
            "NAME",
            show_default=True,
        ),
    )
    """An Optuna sampler: see ``autofit/tuning/sampler.py``."""
    headroom: float = field(
        default=5.0,
        metadata=_flag(
            "Percent of the device to leave free when no --memory is given.",
            Kind.PERCENT,
            "PCT",
            show_default=True,
        ),
    )
    gpus: int | None = field(
        default=None, metadata=_flag("GPUs that may be used.", Kind.COUNT, "N")
    )
    gpus_per_trial: int | None = field(
        default=None, metadata=_flag("GPUs each training spans.", Kind.COUNT, "K")
    )
    storage: str = field(
        metadata=_flag("Where trials are kept (default: ./autofit.db).", Kind.TEXT, "URL")
    )
    """SQLAlchemy URL."""
    address: str | None = field(
        default=None, metadata=_flag("A running Ray cluster.", Kind.TEXT, "RAY")
    )
    """Address of a running Ray cluster; ``None`` for this machine."""
    fresh: bool = field(
        default=False, metadata=_flag("Open a new study; the old one is kept.", Kind.SWITCH)
    )
    lines: tuple[str, ...] = ()
    """Lines that the search shows first: how autofit understood the launch line."""


def flags() -> Iterator[tuple[Field[Any], Flag]]:
    """Yield each field that is an option of the command line, in the order of ``--help``."""
    for each in fields(SearchOptions):
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


def command_line(given: Mapping[str, Any]) -> list[str]:
    """Return the words of ``autofit search`` that set these values, by the names of fields.

    Defaults are left out. The inverse of what Click makes of the words.

    >>> command_line({"trials": 3, "only": frozenset({"precision"}), "fresh": True})
    ['--trials', '3', '--only', 'precision', '--fresh']
    """
    words: list[str] = []
    for each, flag in flags():
        value = given.get(each.name)
        if value is None or str(value) == str(default_of(each)):
            continue
        name = flag_name(each.name)
        if flag.kind is Kind.SWITCH:
            words += [name]
        elif flag.kind is Kind.STRATEGIES:
            words += [word for strategy in sorted(value) for word in (name, strategy)]
        else:
            words += [name, str(value)]
    return words
