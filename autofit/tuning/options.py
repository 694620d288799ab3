"""The options of a search: one dataclass for the Python API and the command line.

A field with a ``Flag`` is an option of ``autofit search``, see ``autofit/flags.py``. Imports
neither torch nor the strategies, so that ``autofit --help`` is quick.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field
from typing import TYPE_CHECKING, Any

from autofit.flags import Flag, ValueKind, flag, flags_of

if TYPE_CHECKING:
    from autofit.strategies import Fidelity
    from autofit.worker.records.trials import Script


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
        default=None,
        metadata=flag(
            "Memory budget per device, such as 24GiB (default: the free memory).",
            ValueKind.SIZE,
            "SIZE",
        ),
    )
    """Bytes per device; ``None`` for the bytes that the device has free."""
    allow: Fidelity = field(
        default_factory=_rounding,
        metadata=flag(
            "What a plan may change in the training; each value includes those before it.",
            ValueKind.FIDELITY,
            show_default=True,
        ),
    )
    prefer: str = field(
        default="fidelity",
        metadata=flag(
            "Of plans that are equally fast: what changes least, needs least memory, or measured"
            " fastest.",
            ValueKind.PREFERENCE,
            show_default=True,
        ),
    )
    """One of ``flags.PREFERENCES``; plans are equally fast within each other's spread."""
    trials: int | None = field(
        default=None, metadata=flag("End after so many trials.", ValueKind.COUNT, "N")
    )
    """Trials in the study at which the search ends, those of earlier searches included."""
    timeout: float | None = field(
        default=None,
        metadata=flag("End after this time, such as 1h30m.", ValueKind.DURATION, "DUR"),
    )
    """Seconds."""
    only: frozenset[str] = field(
        default=frozenset(),
        metadata=flag("Try only this technique (repeatable).", ValueKind.STRATEGIES, "TECHNIQUE"),
    )
    without: frozenset[str] = field(
        default=frozenset(),
        metadata=flag("Do not try this technique (repeatable).", ValueKind.STRATEGIES, "TECHNIQUE"),
    )
    horizon: int = field(
        default_factory=_horizon,
        metadata=flag(
            "Optimizer steps over which compile time is spread.",
            ValueKind.COUNT,
            "STEPS",
            show_default=True,
        ),
    )
    sampler: str = field(
        default="autofit",
        metadata=flag(
            "What proposes plans: autofit, tpe, gp, random, or module:Class of a sampler.",
            ValueKind.TEXT,
            "NAME",
            show_default=True,
        ),
    )
    """An Optuna sampler: see ``autofit/tuning/sampler.py``."""
    headroom: float = field(
        default=5.0,
        metadata=flag(
            "Without --memory: percent of the device to leave free.",
            ValueKind.PERCENT,
            "PCT",
            show_default=True,
        ),
    )
    gpus: int | None = field(
        default=None, metadata=flag("GPUs that the search may use.", ValueKind.COUNT, "N")
    )
    gpus_per_trial: int | None = field(
        default=None,
        metadata=flag(
            "GPUs of each trial (default: by the launch line, else the search chooses).",
            ValueKind.COUNT,
            "K",
        ),
    )
    device: str | None = field(
        default=None,
        metadata=flag(
            "Where no GPU is visible: cpu, for --gpus on the CPU.", ValueKind.TEXT, "cpu"
        ),
    )
    storage: str = field(
        metadata=flag("Store, a file or a URL (default: ./autofit.db).", ValueKind.TEXT, "URL")
    )
    """SQLAlchemy URL."""
    address: str | None = field(
        default=None,
        metadata=flag("Use this running Ray cluster: auto or host:port.", ValueKind.TEXT, "RAY"),
    )
    """Address of a running Ray cluster; ``None`` for this machine."""
    fresh: bool = field(
        default=False, metadata=flag("Start a new study, and keep the old one.", ValueKind.SWITCH)
    )
    lines: tuple[str, ...] = ()
    """Lines that the search shows first: how autofit understood the launch line."""


def flags() -> Iterator[tuple[Field[Any], Flag]]:
    """Yield each field that is an option of ``autofit search``, in the order of ``--help``."""
    yield from flags_of(SearchOptions)
