"""What a service and its clients send to one another besides plain records, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from autofit import exceptions
from autofit.exceptions import AutofitError, ScriptError, WorkerError
from autofit.facts import Facts, Hardware
from autofit.storage import Outcome, Purpose, State, Store, StudyKey, StudyRecord, TrialRecord
from autofit.storage.convert import from_json, to_json
from autofit.storage.owner import Owner
from autofit.tuning.notices import Notice
from autofit.worker.records.phases import Seconds, without
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import Script, TrialReport

_NOTICES: Mapping[str, Any] = {kind.__name__: kind for kind in get_args(Notice)}


def notice_to_json(notice: Notice) -> tuple[str, dict[str, Any]]:
    """Return the kind of a notice and its content."""
    return type(notice).__name__, to_json(notice)


def notice_from_json(kind: str, content: object) -> Notice | None:
    """Return the notice; ``None`` for a kind that this version does not know.

    Raises ``StorageError`` if the content is of another version.
    """
    if kind not in _NOTICES:
        return None
    notice: Notice = from_json(content, _NOTICES[kind])
    return notice


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a search that ended with this error."""
    if not isinstance(error, AutofitError):
        named = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        return Outcome(kind=WorkerError.__name__, message=f"the search broke: {named}")
    traceback = error.traceback if isinstance(error, ScriptError) else ""
    return Outcome(kind=type(error).__name__, message=str(error), traceback=traceback)


def error_of(outcome: Outcome) -> AutofitError:
    """Return the error with which a local search would have ended."""
    if outcome.kind == ScriptError.__name__:
        return ScriptError(outcome.message, outcome.traceback)
    kind = getattr(exceptions, outcome.kind, None)
    if isinstance(kind, type) and issubclass(kind, AutofitError):
        return kind(outcome.message)
    return WorkerError(outcome.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCopy:
    """A finished trial of a study."""

    purpose: Purpose
    launch: int
    report: TrialReport
    trace: Trace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyCopy:
    """A study of a service, to be stored in the user's own store."""

    hardware: Hardware
    budget: int
    versions: dict[str, str]
    facts: Facts | None
    left_out: tuple[tuple[str, str, str], ...]
    seconds: float
    launches: int
    trials: tuple[TrialCopy, ...]
    seconds_by_phase: Seconds = ()
    prefer: str = "fidelity"


def copy_of(store: Store, study: StudyRecord) -> StudyCopy:
    """Return a study with its finished trials."""
    found = store.trials(study, state=State.FINISHED)
    reference = store.reference(study)
    traced = {trial.id for trial in found if trial.purpose is Purpose.CONFIRM}
    traced |= set() if reference is None else {reference[0].id}
    return StudyCopy(
        hardware=study.hardware,
        budget=study.budget,
        versions=dict(study.versions),
        facts=study.facts,
        left_out=study.left_out,
        seconds=study.seconds,
        launches=study.launches,
        trials=tuple(_trial(store, trial, traced) for trial in found),
        seconds_by_phase=study.seconds_by_phase,
        prefer=study.prefer,
    )


def _trial(store: Store, trial: TrialRecord, traced: set[int]) -> TrialCopy:
    """Return the copy of a trial; ``traced``: ids of the trials that have a trace."""
    assert trial.report is not None, "it is finished"
    trace = store.trace(trial) if trial.id in traced else None
    return TrialCopy(purpose=trial.purpose, launch=trial.launch, report=trial.report, trace=trace)


def open_copy(
    store: Store,
    key: StudyKey,
    script: Script,
    hardware: Hardware,
    budget: int,
    *,
    fresh: bool,
) -> StudyRecord:
    """Return the study in ``store`` that will hold the copy of a service's study."""
    return store.open_study(
        key, script=script, hardware=hardware, budget=budget, versions={}, fresh=fresh
    )


def write_copy(
    store: Store, key: StudyKey, script: Script, study: StudyRecord, copy: StudyCopy
) -> StudyRecord:
    """Add what a copy holds to a study in ``store``; what is there already stays.

    A plan of the search that has finished there is not added again.
    """
    store.open_study(
        key,
        script=script,
        hardware=copy.hardware,
        budget=copy.budget,
        versions=copy.versions,
        prefer=copy.prefer,
    )
    if copy.facts is not None:
        store.set_facts(study, copy.facts)
    for left_out in copy.left_out:
        store.leave_out(study, *left_out)
    first = store.study(study.id).launches
    for _ in range(copy.launches - first):
        store.next_launch(study)
    there = store.trials(study, state=State.FINISHED)
    plans = {trial.plan for trial in there if trial.purpose is Purpose.SEARCH}
    reports = [(trial.purpose, trial.report) for trial in there]
    for each in copy.trials:
        search = each.purpose is Purpose.SEARCH
        if (each.purpose, each.report) in reports or (search and each.report.plan in plans):
            continue
        (trial,) = store.add_trials(
            study,
            [each.report.plan],
            launch=each.launch,
            owner=Owner.current(),
            purpose=each.purpose,
        )
        store.finish(trial, each.report, trace=each.trace)
    before = store.study(study.id)
    by_phase = without(copy.seconds_by_phase, before.seconds_by_phase)
    store.add_seconds(study, max(0.0, copy.seconds - before.seconds), by_phase)
    return store.study(study.id)
