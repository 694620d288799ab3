"""What is asked of a search, and what a search would try for it."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.exceptions import StorageError
from autofit.plan import Plan
from autofit.space.catalogue import Reason, space
from autofit.storage import Store, StudyRecord, script_path
from autofit.strategies import Facts, Fidelity
from autofit.worker import meter
from autofit.worker.records.trials import HORIZON, Script


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What was asked of a search."""

    script: Script
    memory: int | None = None
    """Bytes per device; ``None`` for what it has free."""
    allow: Fidelity = Fidelity.ROUNDING
    trials: int | None = None
    """Most trials to have in the study when the search ends."""
    timeout: float | None = None
    """Seconds."""
    only: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    headroom: float = 5.0
    """Per cent of the device left free when no memory was asked for."""
    horizon: int = HORIZON
    """Optimizer steps over which the time to compile is charged."""
    gpus: int | None = None
    gpus_per_trial: int | None = None
    storage: str
    """SQLAlchemy URL."""
    address: str | None = None
    """Of a running Ray cluster."""
    fresh: bool = False
    lines: tuple[str, ...] = ()
    """What people are told first: how the launch line was understood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a search would try."""

    plans: tuple[Plan, ...]
    left_out: tuple[Reason, ...]
    note: str
    minutes: tuple[float, float] | None


def dry_run(options: SearchOptions) -> Preview:
    """Return what ``search`` would try, and start nothing."""
    hardware = meter.hardware(meter.default_device())
    known = _last_seen(options)
    found = space(
        hardware,
        (known.facts if known else None) or Facts(),
        allow=options.allow,
        only=options.only,
        without=options.without,
    )
    return Preview(
        plans=(Plan(), *found.plans()),
        left_out=found.left_out,
        note="" if known else "the script has not been seen yet: some may not apply to it",
        minutes=(known.seconds / 90, known.seconds / 40) if known and known.seconds else None,
    )


def _last_seen(options: SearchOptions) -> StudyRecord | None:
    """Return the newest study of this script that has learned its facts."""
    try:
        with Store(options.storage, create=False) as store:
            records = store.studies(script_path(options.script))
    except StorageError:
        return None
    return next((record for record in records if record.facts is not None), None)
