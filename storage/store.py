"""The class that reads and writes the database."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy import delete, func, select, update
from sqlalchemy.exc import (
    IntegrityError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.orm import Session, undefer

from autofit.exceptions import StorageError, StoreUnavailable
from autofit.facts import Bandwidth, Facts, Hardware
from autofit.plan import Plan
from autofit.storage import convert, engine
from autofit.storage.models import (
    DiscoveryRow,
    EventRow,
    HeldRow,
    SearchRow,
    StudyRow,
    TrialRow,
)
from autofit.storage.owner import TOLERANCE, Owner
from autofit.storage.records import (
    DiscoveryRecord,
    EventRecord,
    EvidenceKey,
    Fingerprinted,
    MachineKey,
    Purpose,
    State,
    StudyKey,
    StudyRecord,
    TrialRecord,
)
from autofit.storage.searches import ACTIVE
from autofit.storage.url import default_url
from autofit.worker.records.phases import Seconds, added
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import Proven, Script, TrialReport, Verdict

R = TypeVar("R")
T = TypeVar("T")

LEASE = timedelta(seconds=60)
"""How long a process on another host counts as alive after its last heartbeat."""


class Store:
    """Studies, their trials, and events; every method is one transaction.

    One process at a time searches a study (see ``holder``); any number may read it. Methods return
    frozen records of the state at the time of the call. A method that returns several records omits
    those that cannot be read, and reports them through ``say``. Threads may share a store.

    Every method raises ``StorageError`` if the database cannot be used, or if a trial's state does
    not allow the change.
    """

    def __init__(self, storage: str | None = None, *, create: bool = True) -> None:
        """Open the store at ``storage``: a path, an SQLAlchemy URL, or ``default_url()``.

        With ``create=False``, raises ``StorageError`` if an SQLite file does not exist.
        """
        self._location = engine.parse(default_url() if storage is None else storage)
        path = engine.sqlite_file(self._location)
        if not create and path is not None and not path.exists():
            raise StorageError(f"there is no store at {path}: search first, or give its --storage")
        if path is not None:
            engine.make_private(path)
        self._reader = engine.open_engine(self._location)
        self._writer = engine.writing(self._reader)
        self.say: Callable[[str], object] | None = None
        """Is called with a line about rows that cannot be read; each row is reported once."""
        self.writes = 0
        """Number of writing transactions that this object has begun.

        Records that were read before the last one may be out of date.
        """
        self._reported: set[str] = set()
        self._claimed: set[str] = set()
        self._pid = os.getpid()
        try:
            with self.explained():
                engine.migrate(self._reader)
        except BaseException:
            self._reader.dispose()
            raise

    @property
    def url(self) -> str:
        """The SQLAlchemy URL with its password, for Optuna's storage."""
        return self._location.render_as_string(hide_password=False)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that one process at a time may enter.

        Optuna needs it to create its tables: it fails if another process creates them too.
        """
        return engine.alone(self._reader)

    def close(self) -> None:
        """Release the studies that this object opened, and close the database."""
        if self._claimed and self._pid == os.getpid():
            # If this fails, the ownership ends with this process or with its lease.
            with contextlib.suppress(StorageError), self.writing() as session:
                session.execute(
                    update(StudyRow)
                    .where(StudyRow.id.in_(self._claimed), held_by(StudyRow, Owner.current()))
                    .values(owner_host=None, owner_pid=None, owner_started=None, lease_until=None)
                )
        self._claimed.clear()
        self._reader.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- studies ------------------------------------------------------------------------------

    def open_study(
        self,
        key: StudyKey,
        *,
        script: Script,
        hardware: Hardware,
        budget: int,
        versions: Mapping[str, str],
        prefer: str = "fidelity",
        fresh: bool = False,
    ) -> StudyRecord:
        """Return the newest study with this key, or a new one; with ``fresh`` always a new one.

        This process becomes the study's holder, and an existing study gets the given script,
        hardware, budget in bytes, versions and preference (``StudyRecord.prefer``). If another live
        process holds the study, it stays as it is.
        """
        now, me = _now(), Owner.current()
        with self.writing() as session:
            newest = session.scalar(
                select(StudyRow)
                .where(StudyRow.fingerprint == key.fingerprint)
                .order_by(StudyRow.generation.desc())
                .limit(1)
                .with_for_update()
            )
            if newest is None or fresh:
                study = _new_study(session, key, 1 + (newest.generation if newest else 0))
                study.created = now
                session.add(study)
            else:
                study = newest
            if live_owner(study, now, other_than=me) is None:
                study.script = script
                study.hardware = hardware
                study.budget = budget
                study.versions = dict(versions)
                study.prefer = prefer
                study.opened = now
                give_to(study, me, now)
                self._claimed.add(study.id)
            session.flush()
            return self._record(StudyRow.record, study)

    def studies(self, script_path: str | None = None) -> tuple[StudyRecord, ...]:
        """Return all studies, or those of one ``records.script_path``, newest first."""
        query = select(StudyRow).order_by(StudyRow.created.desc(), StudyRow.generation.desc())
        if script_path is not None:
            query = query.where(StudyRow.script_path == convert.readable(script_path))
        with self.reading() as session:
            return self._records(StudyRow.record, session.scalars(query))

    def study(self, identifier: str) -> StudyRecord:
        """Return the present state of the study with this identifier."""
        with self.reading() as session:
            return self._record(StudyRow.record, self._study(session, identifier))

    def set_facts(self, study: StudyRecord, facts: Facts) -> StudyRecord:
        """Store the facts about the script in place of earlier ones."""
        with self.writing() as session:
            row = self._study(session, study.id)
            row.facts = facts
            return self._record(StudyRow.record, row)

    def delete_study(self, study: StudyRecord) -> None:
        """Delete a study with its trials and its events.

        Discoveries on the script stay, because other studies of the script use them.
        """
        with self.writing() as session:
            row = self._study(session, study.id)
            mine = select(TrialRow.id).filter_by(study_id=study.id)
            session.execute(
                delete(EventRow).where(
                    (EventRow.study_id == study.id) | EventRow.trial_id.in_(mine)
                )
            )
            session.execute(delete(TrialRow).filter_by(study_id=study.id))
            session.execute(update(SearchRow).filter_by(study_id=study.id).values(study_id=None))
            session.delete(row)

    def leave_out(self, study: StudyRecord, strategy: str, level: str, reason: str) -> StudyRecord:
        """Exclude this level from this study; a later reason does not replace the first."""
        with self.writing() as session:
            row = self._study(session, study.id)
            left_out = row.cell("left_out")
            if not any((strategy, level) == each[:2] for each in left_out):
                row.left_out = (*left_out, (strategy, level, reason))
            return self._record(StudyRow.record, row)

    def add_seconds(
        self, study: StudyRecord, seconds: float, by_phase: Seconds = ()
    ) -> StudyRecord:
        """Add ``seconds`` to the study's search time; ``by_phase``: those outside of trials."""
        with self.writing() as session:
            row = self._study(session, study.id)
            row.seconds += seconds
            row.seconds_by_phase = added(row.cell("seconds_by_phase"), by_phase)
            return self._record(StudyRow.record, row)

    def next_launch(self, study: StudyRecord) -> int:
        """Return a new number for the next launch: 0, 1, 2, ... in this study."""
        with self.writing() as session:
            row = self._study(session, study.id)
            row.launches += 1
            return row.launches - 1

    # --- owners -------------------------------------------------------------------------------

    def holder(self, study: StudyRecord) -> Owner | None:
        """Return another live process that searches the study, or ``None``."""
        now, me = _now(), Owner.current()
        with self.reading() as session:
            rows: list[HeldRow] = [self._study(session, study.id)]
            rows += session.scalars(_running(study))
            live = (live_owner(row, now, other_than=me) for row in rows)
            return next((owner for owner in live if owner is not None), None)

    def heartbeat(self, owner: Owner) -> None:
        """Renew the lease of all that ``owner`` holds; call it well within ``LEASE``."""
        lease = _now() + LEASE
        with self.writing() as session:
            session.execute(
                update(TrialRow)
                .where(TrialRow.state == State.RUNNING, held_by(TrialRow, owner))
                .values(lease_until=lease)
            )
            session.execute(
                update(StudyRow).where(held_by(StudyRow, owner)).values(lease_until=lease)
            )
            session.execute(
                update(SearchRow)
                .where(SearchRow.state.in_(ACTIVE), held_by(SearchRow, owner))
                .values(lease_until=lease)
            )

    def reclaim(self, study: StudyRecord) -> int:
        """Interrupt the running trials whose owner has ended; return how many.

        On this host, an owner has ended if its process no longer runs. On another host, it has
        ended if its lease is over.
        """
        now = _now()
        with self.writing() as session:
            rows = [row for row in session.scalars(_running(study)) if not live_owner(row, now)]
            for row in rows:
                _end(row, State.INTERRUPTED, now)
            return len(rows)

    # --- trials -------------------------------------------------------------------------------

    def add_trials(
        self,
        study: StudyRecord,
        plans: Sequence[Plan],
        *,
        launch: int,
        owner: Owner,
        purpose: Purpose = Purpose.SEARCH,
    ) -> tuple[TrialRecord, ...]:
        """Add one running trial for each plan, in this order, owned by ``owner``."""
        now = _now()
        with self.writing() as session:
            parent = self._study(session, study.id)
            last = session.scalar(select(func.max(TrialRow.number)).filter_by(study_id=study.id))
            rows = [
                TrialRow(
                    study_id=study.id,
                    number=number,
                    purpose=purpose,
                    state=State.RUNNING,
                    plan=plan,
                    launch=launch,
                    budget=parent.budget,
                    versions=parent.versions,
                    created=now,
                )
                for number, plan in enumerate(plans, start=0 if last is None else last + 1)
            ]
            for row in rows:
                give_to(row, owner, now)
            session.add_all(rows)
            session.flush()
            return tuple(self._record(TrialRow.record, row) for row in rows)

    def finish(
        self,
        trial: TrialRecord,
        report: TrialReport,
        *,
        trace: Trace | None = None,
    ) -> TrialRecord:
        """Store the report of a running trial in one transaction; the trial is final afterwards.

        ``trace``: given for the trial with which later ones are compared (``reference``), and for
        confirmation runs.
        """
        if report.plan != trial.plan:
            raise StorageError(
                f"{_name(trial)} runs {trial.plan}; a report on {report.plan} cannot finish it"
            )
        if report.verdict is Verdict.INTERRUPTED:
            raise StorageError(f"{_name(trial)} was interrupted: release it, do not finish it")
        with self.writing() as session:
            row = self._running_trial(session, trial, State.FINISHED)
            _set_report(row, report)
            row.trace = trace
            if row.purpose == Purpose.SEARCH:
                row.finished_plan = json.dumps(convert.to_json(trial.plan))
            _end(row, State.FINISHED, _now())
            try:
                session.flush()
            except IntegrityError as error:
                if "finished_plan" not in str(error.orig):
                    raise
                raise StorageError(
                    f"{_name(trial)} cannot be finished: another trial of this study has"
                    f" finished the same plan ({trial.plan}); release it"
                ) from error
            return self._record(TrialRow.record, row)

    def amend(self, trial: TrialRecord, report: TrialReport) -> TrialRecord:
        """Replace the report of a finished trial: its process has learned more since."""
        with self.writing() as session:
            row = self._trial(session, trial)
            if row.state != State.FINISHED:
                raise StorageError(f"{_name(trial)} has not finished; finish it")
            _set_report(row, report)
            return self._record(TrialRow.record, row)

    def release(self, trial: TrialRecord) -> None:
        """Delete a running trial that gets no verdict; its plan may get a new trial."""
        with self.writing() as session:
            session.delete(self._running_trial(session, trial, "released"))

    def trials(
        self,
        study: StudyRecord,
        *,
        state: State | None = None,
        purpose: Purpose | None = None,
    ) -> tuple[TrialRecord, ...]:
        """Return the study's trials by number, with their reports."""
        query = select(TrialRow).filter_by(study_id=study.id).order_by(TrialRow.number)
        if state is not None:
            query = query.filter_by(state=state)
        if purpose is not None:
            query = query.filter_by(purpose=purpose)
        with self.reading() as session:
            return self._records(TrialRow.record, session.scalars(query))

    def reference(self, study: StudyRecord) -> tuple[TrialRecord, Trace] | None:
        """Return the first trial of the study's search that has a trace, and the trace."""
        query = (
            select(TrialRow)
            .filter_by(study_id=study.id, purpose=Purpose.SEARCH)
            .where(TrialRow.trace.is_not(None))
            .order_by(TrialRow.number)
            .options(undefer(TrialRow.trace))
        )
        with self.reading() as session:
            return next(iter(self._records(TrialRow.traced, session.scalars(query))), None)

    def trace(self, trial: TrialRecord) -> Trace | None:
        """Return the trace of a trial, if it is stored: of the reference and confirmation runs."""
        with self.reading() as session:
            row = self._trial(session, trial)
            return None if row.trace is None else self._record(TrialRow.traced, row)[1]

    # --- events -------------------------------------------------------------------------------

    def record_event(
        self,
        kind: str,
        payload: Mapping[str, Any],
        *,
        study: StudyRecord | None = None,
        trial: TrialRecord | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> EventRecord:
        """Store an event that happened outside trials; ``payload`` is plain JSON."""
        with self.writing() as session:
            row = EventRow(
                kind=kind,
                payload=dict(payload),
                versions=dict(versions or (study.versions if study else {})),
                study_id=study.id if study else None,
                trial_id=trial.id if trial else None,
                created=_now(),
            )
            session.add(row)
            session.flush()
            return self._record(EventRow.record, row)

    def events(
        self, kind: str | None = None, *, study: StudyRecord | None = None
    ) -> tuple[EventRecord, ...]:
        """Return the events, oldest first; all, or those of one kind or one study."""
        query = select(EventRow).order_by(EventRow.id)
        if kind is not None:
            query = query.filter_by(kind=kind)
        if study is not None:
            query = query.filter_by(study_id=study.id)
        with self.reading() as session:
            return self._records(EventRow.record, session.scalars(query))

    # --- discoveries --------------------------------------------------------------------------

    def learn(
        self,
        key: Fingerprinted,
        found: Mapping[str, Any],
        *,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """Store what was found out about ``key``: plain JSON by name.

        It replaces what was known under the same name.
        """
        known = select(DiscoveryRow).filter_by(fingerprint=key.fingerprint)
        with self.writing() as session:
            rows = {
                row.name: row for row in session.scalars(known.where(DiscoveryRow.name.in_(found)))
            }
            for name, content in found.items():
                row = rows.get(name)
                if row is None:
                    row = DiscoveryRow(fingerprint=key.fingerprint, name=name, key=asdict(key))
                    session.add(row)
                row.content, row.versions, row.updated = content, dict(versions or {}), _now()

    def discoveries(self, key: Fingerprinted) -> dict[str, DiscoveryRecord]:
        """Return what is known of ``key``, by name, in the order in which it was first stored."""
        query = (
            select(DiscoveryRow).filter_by(fingerprint=key.fingerprint).order_by(DiscoveryRow.id)
        )
        with self.reading() as session:
            return {
                each.name: each
                for each in self._records(DiscoveryRow.record, session.scalars(query))
            }

    def add_evidence(self, key: EvidenceKey, found: Sequence[Proven]) -> None:
        """Store evidence on a script; it replaces evidence with the same key."""
        self.learn(key, {each.key: each.content for each in found})

    def evidence(self, key: EvidenceKey) -> tuple[Proven, ...]:
        """Return the evidence on a script, in the order in which it was first stored."""
        return tuple(
            Proven(key=n, content=each.content) for n, each in self.discoveries(key).items()
        )

    def bandwidths(self, machine: MachineKey) -> dict[int, Bandwidth]:
        """Return how fast the ranks of such a machine communicate, by their number."""
        found = self.discoveries(machine).items()
        return {int(ranks): convert.from_json(each.content, Bandwidth) for ranks, each in found}

    def set_bandwidth(self, machine: MachineKey, ranks: int, bandwidth: Bandwidth) -> None:
        """Store how fast ``ranks`` ranks communicate; it replaces an earlier measurement."""
        self.learn(machine, {str(ranks): asdict(bandwidth)})

    # --- sessions and rows --------------------------------------------------------------------

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors of the database, also those that Optuna wraps, into ``StorageError``."""
        try:
            yield
        except Exception as error:
            cause = error if isinstance(error, SQLAlchemyError) else error.__cause__
            if isinstance(error, StorageError) or not isinstance(cause, SQLAlchemyError):
                raise
            silent = isinstance(cause, OperationalError | InterfaceError)
            kind = StoreUnavailable if silent else StorageError
            raise kind(engine.explain(self._location, cause)) from error

    def _record(self, read: Callable[[R], T], row: R) -> T:
        """Return the record of a row; raise ``StorageError`` with the row's name if unreadable.

        The file may have been edited or damaged, or another version of autofit wrote it.
        """
        try:
            return read(row)
        except (StorageError, AttributeError, LookupError, TypeError, ValueError) as error:
            remedy = "search again with --fresh, or use the version of autofit that wrote it"
            raise StorageError(
                f"{_named(row)} in the store {engine.show(self._location)} cannot be read: {error}"
                + (f"; {remedy}" if isinstance(row, StudyRow | TrialRow) else "")
            ) from error

    def _records(self, read: Callable[[R], T], rows: Iterable[R]) -> tuple[T, ...]:
        """Return the records of all readable rows; report unreadable ones through ``say``."""
        found, unreadable = [], []
        for row in rows:
            try:
                found.append(self._record(read, row))
            except StorageError as error:
                unreadable.append(str(error))
        if unreadable and self.say is not None and not self._reported.issuperset(unreadable):
            self._reported.update(unreadable)
            more = f" (and {len(unreadable) - 1} more)" if len(unreadable) > 1 else ""
            self.say(f"left out{more}: {unreadable[0]}")
        return tuple(found)

    @contextmanager
    def _session(self, *, write: bool) -> Iterator[Session]:
        """Run one transaction: commit it at the end, roll it back on an exception."""
        bind = self._writer if write else self._reader
        with self.explained(), Session(bind, expire_on_commit=False) as session, session.begin():
            yield session

    def reading(self) -> contextlib.AbstractContextManager[Session]:
        """Return a transaction that only reads."""
        return self._session(write=False)

    def writing(self) -> contextlib.AbstractContextManager[Session]:
        """Return a transaction that writes; it commits at its end."""
        self.writes += 1
        return self._session(write=True)

    def _study(self, session: Session, identifier: str) -> StudyRow:
        row = session.get(StudyRow, identifier, with_for_update=session.bind is self._writer)
        if row is None:
            raise StorageError(f"the store {engine.show(self._location)} has no study {identifier}")
        return row

    def _trial(self, session: Session, trial: TrialRecord) -> TrialRow:
        row = session.get(TrialRow, trial.id, with_for_update=True)
        if row is None:
            raise StorageError(f"the store {engine.show(self._location)} has no {_name(trial)}")
        return row

    def _running_trial(self, session: Session, trial: TrialRecord, to: str) -> TrialRow:
        row = self._trial(session, trial)
        if row.state != State.RUNNING:
            raise StorageError(
                f"{_name(trial)} is {row.state} and stays so; only a running trial is {to}"
            )
        return row


def _set_report(row: TrialRow, report: TrialReport) -> None:
    row.report = replace(
        report,
        reason=convert.readable(report.reason),
        traceback=convert.readable(report.traceback),
    )
    row.verdict = report.verdict
    row.out_of_memory = report.out_of_memory.phase if report.out_of_memory else None


def _named(row: object) -> str:
    """Return the name of a row for messages."""
    match row:
        case StudyRow():
            return f"study {row.id}"
        case TrialRow():
            return f"trial {row.number} of study {row.study_id}"
        case EventRow():
            return f"event {row.id}"
        case DiscoveryRow():
            return f"discovery {row.name} on {row.key}"
    return "a row"


def _now() -> datetime:
    return datetime.now(UTC)


def _name(trial: TrialRecord) -> str:
    return f"trial {trial.number} of study {trial.study}"


def _running(study: StudyRecord) -> Any:
    return select(TrialRow).filter_by(study_id=study.id, state=State.RUNNING)


def _new_study(session: Session, key: StudyKey, generation: int) -> StudyRow:
    """Return an empty study with a new identifier."""
    stem = key.fingerprint[:8]
    taken = set(session.scalars(select(StudyRow.id).where(StudyRow.id.startswith(stem))))
    names = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
    return StudyRow(
        id=next(name for name in names if name not in taken),
        fingerprint=key.fingerprint,
        generation=generation,
        script_path=convert.readable(key.script),
        key=key,
        left_out=(),
        seconds=0.0,
        seconds_by_phase=(),
        launches=0,
    )


def held_by(table: type[HeldRow], owner: Owner) -> Any:
    """Return the condition that ``owner`` holds a row of ``table``."""
    return (
        (table.owner_host == owner.host)
        & (table.owner_pid == owner.pid)
        & (func.abs(table.owner_started - owner.started) < TOLERANCE)
    )


def give_to(row: HeldRow, owner: Owner, now: datetime) -> None:
    """Make ``owner`` the owner of ``row``."""
    row.owner_host, row.owner_pid, row.owner_started = owner.host, owner.pid, owner.started
    row.lease_until = now + LEASE


def _end(row: TrialRow, state: State, now: datetime) -> None:
    row.state = state
    row.ended = now
    row.lease_until = None


def live_owner(row: HeldRow, now: datetime, other_than: Owner | None = None) -> Owner | None:
    """Return the owner of ``row``, if that process is alive and is not ``other_than``."""
    owner = row.owner
    if owner is None or (other_than is not None and owner.same(other_than)):
        return None
    alive = owner.alive()
    if alive is None:
        alive = row.lease_until is not None and row.lease_until > now
    return owner if alive else None
