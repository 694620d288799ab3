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
"""Seconds of the last search of the script that make one minute of the estimate: at least, at most.

A search that starts anew spends between two thirds and one and a half times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a search would try."""

    plans: tuple[Plan, ...]
    left_out: tuple[Reason, ...]
    note: str
    minutes: tuple[float, float] | None
    """Least and most minutes of a device; ``None`` where no search of the script was stored."""


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
    seconds = known.seconds if known else 0.0
    least, most = (seconds / each for each in SECONDS_PER_MINUTE)
    return Preview(
        plans=(Plan(), *found.plans()),
        left_out=found.left_out,
        note="" if known else "the script has not run yet: some plans may not apply to it",
        minutes=(least, most) if seconds else None,
    )


def _last_seen(options: SearchOptions) -> StudyRecord | None:
    """Return the newest study of this script that has learned its facts."""
    try:
        with Store(options.storage, create=False) as store:
            records = store.studies(script_path(options.script))
    except StorageError:
        return None
    return next((record for record in records if record.facts is not None), None)
