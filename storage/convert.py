"""Converts rows to records and back; cattrs converts the JSON columns without loss."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import cattrs

from autofit.exceptions import StorageError, UsageError
from autofit.facts import Bandwidth, Facts, Hardware
from autofit.plan import Plan
from autofit.storage import models
from autofit.storage.owner import Owner
from autofit.storage.records import (
    EventRecord,
    FittedKey,
    FittedRecord,
    InspectionKey,
    InspectionRecord,
    Purpose,
    State,
    StudyKey,
    StudyRecord,
    TrialRecord,
)
from autofit.storage.searches import (
    AuditRecord,
    NoticeRecord,
    Outcome,
    SearchRecord,
    SearchState,
    Submission,
    TokenRecord,
)
from autofit.worker.records.phases import Seconds
from autofit.worker.records.trials import Measurement, OutOfMemory, Script, TrialReport, Verdict

T = TypeVar("T")

_SET_BY_LAUNCHERS = re.compile(
    "(ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG|TORCHELASTIC)_[A-Z0-9_]+"
    "|((LOCAL_|ROLE_|GROUP_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT))"
    "|OMP_NUM_THREADS|KMP_(AFFINITY|BLOCKTIME)|NCCL_(P2P|IB)_DISABLE"
    "|TORCH_NCCL_ASYNC_ERROR_HANDLING|XLA_(USE|DOWNCAST)_BF16"
    "|PYTHON(UNBUFFERED|DONTWRITEBYTECODE|OPTIMIZE|DEVMODE|FAULTHANDLER|UTF8)"
)
"""Names of the variables that ``torchrun``, ``accelerate launch`` and options of ``python`` set.

None of them makes a process load a file: see ``set_by_launchers``.
"""
_WARNINGS = "PYTHONWARNINGS"
"""Variable for ``python -W``. Python imports the module of a category with a dot in its name."""

_converter = cattrs.Converter()
# A loss may be NaN or infinite, and JSON has neither; float() reads the strings back.
_converter.register_unstructure_hook(float, lambda x: x if math.isfinite(x) else str(x))


def to_json(record: object) -> dict[str, Any]:
    """Return a frozen record as plain JSON."""
    plain: dict[str, Any] = _converter.unstructure(record)
    return plain


def from_json(plain: object, kind: type[T]) -> T:
    """Return the record that ``to_json`` was given; raise ``StorageError`` if it is not one."""
    try:
        return _converter.structure(plain, kind)
    except (
        cattrs.BaseValidationError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise StorageError(f"it holds no {kind.__name__} of this version of autofit") from error


def table(plain: object, what: str) -> dict[str, Any]:
    """Return ``plain``, a JSON object; raise ``StorageError`` if it is something else."""
    if not isinstance(plain, dict):
        raise StorageError(f"its {what} is no JSON object")
    return plain


def readable(text: str) -> str:
    """Return ``text`` without lone surrogates and NUL, which not every database can store."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\0")


def plan_to_json(plan: Plan) -> dict[str, str]:
    """Return the changed levels of ``plan``."""
    return dict(plan.changes)


def plan_from_json(plain: Mapping[str, str]) -> Plan:
    """Return the plan with these levels; raise ``StorageError`` for an unknown level."""
    try:
        return Plan.of(plain)
    except UsageError as error:
        raise StorageError(f"it holds no plan of this version of autofit ({error})") from error


def plan_digest(plan: Plan) -> str:
    """Return 64 hexadecimal digits that are the same for equal plans."""
    text = json.dumps(plan_to_json(plan), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def owner_of(row: models.Held) -> Owner | None:
    """Return the process that owns ``row`` or owned it last; ``None`` if there was none."""
    if row.owner_host is None or row.owner_pid is None or row.owner_started is None:
        return None
    return Owner(host=row.owner_host, pid=row.owner_pid, started=row.owner_started)


def study_record(row: models.Study) -> StudyRecord:
    """Return the record of a study's row."""
    return StudyRecord(
        id=row.id,
        key=from_json(row.key, StudyKey),
        script=_script(row),
        hardware=from_json(row.hardware, Hardware),
        budget=row.budget,
        versions=table(row.versions, "versions"),
        facts=None if row.facts is None else from_json(row.facts, Facts),
        left_out=from_json(row.left_out, tuple[tuple[str, str, str], ...]),
        seconds=row.seconds,
        launches=row.launches,
        created=row.created,
        opened=row.opened,
        seconds_by_phase=seconds_by_phase(row),
        prefer=row.prefer,
    )


def seconds_by_phase(row: models.Study | models.Trial) -> Seconds:
    """Return the seconds of a row by phase."""
    plain = table(row.seconds_by_phase, "seconds by phase")
    return from_json(list(plain.items()), Seconds)


def _script(row: models.Study) -> Script:
    """Return a study's script, whose environment only has variables that launchers set."""
    script = from_json(row.script, Script)
    return replace(script, environment=set_by_launchers(script.environment))


def set_by_launchers(found: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the variables of a stored environment that a launcher may have set.

    All others are removed. Otherwise, a person who can write to the store could make a process load
    a library or a module with ``LD_PRELOAD``, ``PYTHONPATH`` or ``BASH_ENV``.
    """
    return tuple(
        (name, value)
        for name, value in found
        if _SET_BY_LAUNCHERS.fullmatch(name) or (name == _WARNINGS and "." not in value)
    )


def trial_record(row: models.Trial) -> TrialRecord:
    """Return the record of a trial's row, with its measurements."""
    owner = owner_of(row)
    assert owner is not None
    return TrialRecord(
        id=row.id,
        study=row.study_id,
        number=row.number,
        purpose=Purpose(row.purpose),
        state=State(row.state),
        plan=plan_from_json(row.plan),
        launch=row.launch,
        owner=owner,
        budget=row.budget,
        versions=table(row.versions, "versions"),
        created=row.created,
        ended=row.ended,
        optuna_number=row.optuna_number,
        report=_report(row),
    )


def _report(row: models.Trial) -> TrialReport | None:
    if row.verdict is None:
        return None
    shortage = row.out_of_memory
    return TrialReport(
        index=row.position or 0,
        plan=plan_from_json(row.plan),
        verdict=Verdict(row.verdict),
        reason=row.reason or "",
        best=None if row.best is None else plan_from_json(row.best),
        measurements=tuple(_measurement(each) for each in row.measurements),
        out_of_memory=None if shortage is None else from_json(shortage, OutOfMemory),
        blamed=row.blamed,
        traceback=row.traceback or "",
        startup_seconds=row.startup_seconds or 0.0,
        seconds_by_phase=seconds_by_phase(row),
    )


def write_report(row: models.Trial, report: TrialReport) -> None:
    """Fill a trial's row, and its measurements' rows, from ``report``."""
    row.position = report.index
    row.verdict = report.verdict
    row.reason = readable(report.reason)
    row.best = None if report.best is None else plan_to_json(report.best)
    row.out_of_memory = None if report.out_of_memory is None else to_json(report.out_of_memory)
    row.blamed = report.blamed
    row.traceback = readable(report.traceback)
    row.startup_seconds = report.startup_seconds
    row.seconds_by_phase = dict(report.seconds_by_phase)
    row.measurements = [
        models.Measurement(position=position, **to_json(each))
        for position, each in enumerate(report.measurements)
    ]


def _measurement(row: models.Measurement) -> Measurement:
    names = (field.name for field in fields(Measurement))
    return from_json({name: getattr(row, name) for name in names}, Measurement)


def event_record(row: models.Event) -> EventRecord:
    """Return the record of an event's row."""
    return EventRecord(
        id=row.id,
        kind=row.kind,
        payload=table(row.payload, "payload"),
        versions=table(row.versions, "versions"),
        study=row.study_id,
        trial=row.trial_id,
        created=row.created,
    )


def inspection_record(row: models.Inspection) -> InspectionRecord:
    """Return the record of a check's row."""
    return InspectionRecord(
        key=from_json(row.key, InspectionKey),
        content=table(row.content, "content"),
        versions=table(row.versions, "versions"),
        updated=row.updated,
    )


def bandwidth(row: models.MeasuredBandwidth) -> Bandwidth:
    """Return the figures of a machine's row."""
    return Bandwidth(
        all_reduce=row.all_reduce,
        all_gather=row.all_gather,
        reduce_scatter=row.reduce_scatter,
    )


def fitted_record(row: models.Fitted) -> FittedRecord:
    """Return the record of the setting that fitted in a decorated function."""
    return FittedRecord(
        key=from_json(row.key, FittedKey),
        kept=table(row.kept, "record of what fitted"),
        versions=table(row.versions, "versions"),
        updated=row.updated,
    )


def search_record(row: models.Search, *, waits_for: str = "") -> SearchRecord:
    """Return the record of the row of a service's search.

    ``waits_for``: why it waits, if the row does not say so.
    """
    return SearchRecord(
        id=row.id,
        user=row.user,
        state=SearchState(row.state),
        submission=from_json(row.submission, Submission),
        study=row.study_id,
        waits_for=row.waits_for or waits_for,
        priority=row.priority,
        deadline=row.deadline,
        gpus=row.gpus,
        cancelled=row.cancelled,
        attempts=row.attempts,
        outcome=None if row.outcome is None else from_json(row.outcome, Outcome),
        owner=owner_of(row),
        created=row.created,
        started=row.started,
        ended=row.ended,
    )


def notice_record(row: models.Notice) -> NoticeRecord:
    """Return the record of a notice's row."""
    return NoticeRecord(id=row.id, kind=row.kind, content=table(row.content, "content"))


def token_record(row: models.Token) -> TokenRecord:
    """Return the record of a row of a token."""
    return TokenRecord(id=row.id, user=row.user, created=row.created, expires=row.expires)


def audit_record(row: models.Audit) -> AuditRecord:
    """Return the record of a row of the audit trail."""
    return AuditRecord(
        id=row.id,
        user=row.user,
        action=row.action,
        target=row.target,
        address=row.address,
        created=row.created,
    )
