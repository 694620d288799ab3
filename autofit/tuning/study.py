"""What a study is of: what was asked, of which device, within which budget, with which versions."""

from __future__ import annotations

from collections.abc import Mapping

from autofit.exceptions import UsageError
from autofit.storage import Purpose, State, Store, StudyKey, StudyRecord, TrialRecord
from autofit.strategies import Hardware
from autofit.tuning import messages
from autofit.tuning.notices import StudyStarted
from autofit.tuning.options import SearchOptions
from autofit.units import format_size
from autofit.worker.cluster.versions import versions

__all__ = ["budget", "key", "study_started", "taken", "versions"]


def key(options: SearchOptions, hardware: Hardware) -> StudyKey:
    """Return what makes another search the same study as this one."""
    return StudyKey.of(
        options.script,
        gpu=hardware.name,
        gpus=options.gpus_per_trial or 1,
        memory=options.memory,
        allow=str(options.allow),
    )


def budget(free: int, hardware: Hardware, asked: int | None, headroom: float) -> int:
    """Return the bytes a trial may occupy on the device.

    ``asked``: taken as it is; raise ``UsageError`` if the device has less. Without it: what the
    device has ``free``, less ``headroom`` per cent of the whole.
    """
    if asked is None:
        return max(0, int(free - hardware.total_bytes * headroom / 100))
    if asked > hardware.total_bytes:
        raise UsageError(
            f"--memory {format_size(asked)} is more than {hardware.name} has"
            f" ({format_size(hardware.total_bytes)}): give less, or leave it out"
        )
    return asked


def taken(
    store: Store,
    options: SearchOptions,
    hardware: Hardware,
    budget: int,
    installed: Mapping[str, str],
) -> tuple[StudyRecord, tuple[TrialRecord, ...]]:
    """Return the study to search, for this process alone, and the trials it holds.

    One in which the script failed begins anew. Raises ``UsageError`` where another process searches
    it.
    """

    def found(*, fresh: bool) -> StudyRecord:
        return store.open_study(
            key(options, hardware),
            script=options.script,
            hardware=hardware,
            budget=budget,
            versions=installed,
            fresh=fresh,
        )

    study = found(fresh=options.fresh)
    if (other := store.holder(study)) is not None:
        raise UsageError(
            f"process {other.pid} on {other.host} searches this study already:"
            " wait until it ends, or open a new study with --fresh"
        )
    store.reclaim(study)
    before = store.trials(study, state=State.FINISHED, purpose=Purpose.SEARCH)
    if not options.fresh and messages.failed(before):  # there is nothing to carry on
        return found(fresh=True), ()
    return study, before


def study_started(
    study: StudyRecord, options: SearchOptions, *, devices: int, resumed: int
) -> StudyStarted:
    """Return the notice that a study is open; ``resumed``: trials it holds already."""
    return StudyStarted(
        study=study.id,
        script=options.script,
        hardware=study.hardware,
        devices=devices,
        budget=study.budget,
        asked=options.memory is not None,
        allow=str(options.allow),
        resumed=resumed,
    )
