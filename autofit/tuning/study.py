"""Opens the study of a search: its key, its budget and its earlier trials."""

from __future__ import annotations

from collections.abc import Mapping

from autofit.exceptions import UsageError
from autofit.storage import Purpose, State, Store, StudyKey, StudyRecord, TrialRecord
from autofit.strategies import Hardware
from autofit.tuning import messages
from autofit.tuning.options import SearchOptions
from autofit.units import format_size


def budget(free: int, hardware: Hardware, memory: int | None, headroom: float) -> int:
    """Return the bytes that a trial may occupy on the device.

    This is ``memory`` if given. Otherwise it is ``free`` minus ``headroom`` per cent of the
    device's memory. Raises ``UsageError`` if the device has less than ``memory``.
    """
    if memory is None:
        return max(0, int(free - hardware.total_bytes * headroom / 100))
    if memory > hardware.total_bytes:
        raise UsageError(
            f"--memory {format_size(memory)} is more than {hardware.name} has"
            f" ({format_size(hardware.total_bytes)}): give less, or leave it out"
        )
    return memory


def open_study(
    store: Store,
    options: SearchOptions,
    hardware: Hardware,
    budget: int,
    installed: Mapping[str, str],
    spread: int = 1,
) -> tuple[StudyRecord, tuple[TrialRecord, ...]]:
    """Return the study to search and its finished trials. Searches with equal keys share a study.

    ``spread``: devices over which the search may spread a training.
    A study in which the script failed is replaced by a new one. Raises ``UsageError`` if another
    process searches the study.
    """

    key = StudyKey.of(
        options.script,
        gpu=hardware.name,
        gpus=options.gpus_per_trial or 1,
        memory=options.memory,
        allow=str(options.allow),
        spread=spread,
    )

    def found(*, fresh: bool) -> StudyRecord:
        return store.open_study(
            key,
            script=options.script,
            hardware=hardware,
            budget=budget,
            versions=installed,
            prefer=options.prefer,
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
    if not options.fresh and messages.failed(before):
        return found(fresh=True), ()
    return study, before
