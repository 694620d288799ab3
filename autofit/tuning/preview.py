"""``autofit search --dry-run``: the plans that a search would try, without a launch."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.exceptions import StorageError
from autofit.plan import Plan
from autofit.space.catalogue import Reason, space
from autofit.storage import Store, StudyRecord, script_path
from autofit.strategies import Facts
from autofit.tuning.options import SearchOptions
from autofit.worker import meter

SECONDS_PER_MINUTE = (90, 40)
"""Divisors that turn the seconds of the script's last search into least and most minutes.

A new search takes between two thirds of the last one's time and one and a half times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The plans that a search would try."""

    plans: tuple[Plan, ...]
    left_out: tuple[Reason, ...]
    """Levels that the search would not try, each with a reason."""
    note: str
    """A caveat for the user; empty if there is none."""
    minutes: tuple[float, float] | None
    """Least and most minutes on one device; ``None`` if no search of the script is stored."""


def dry_run(options: SearchOptions) -> Preview:
    """Return the plans that ``search`` would try, without starting a process."""
    hardware = meter.hardware(meter.default_device())
    known = _last_seen(options)
    found = space(
        hardware,
        (known.facts if known else None) or Facts(),
        allow=options.allow,
        only=options.only,
        without=options.without,
    )
    seconds = known.seconds if known else 0.0
    least, most = (seconds / each for each in SECONDS_PER_MINUTE)
    return Preview(
        plans=(Plan(), *found.plans()),
        left_out=found.left_out,
        note="" if known else "the script has not run yet: some plans may not apply to it",
        minutes=(least, most) if seconds else None,
    )


def _last_seen(options: SearchOptions) -> StudyRecord | None:
    """Return the newest study of this script with known facts; ``None`` if there is none."""
    try:
        with Store(options.storage, create=False) as store:
            records = store.studies(script_path(options.script))
    except StorageError:
        return None
    return next((record for record in records if record.facts is not None), None)
