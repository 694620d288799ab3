"""The database tables. Only this package uses rows; ``migrations`` creates the tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from autofit.exceptions import StorageError
from autofit.facts import Facts, Hardware
from autofit.plan import Plan
from autofit.storage.convert import from_json, set_by_launchers, to_json
from autofit.storage.owner import Owner
from autofit.storage.records import (
    DiscoveryRecord,
    EventRecord,
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
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import Script, TrialReport

T = TypeVar("T")


class UtcTime(TypeDecorator[datetime]):
    """A point in time, written and read in UTC, because SQLite does not store time zones."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return ``value`` in UTC, for the database."""
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return ``value`` with the time zone UTC."""
        return None if value is None else value.replace(tzinfo=value.tzinfo or UTC).astimezone(UTC)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A cell that holds no record, for instance because somebody edited it."""

    reason: str


class Stored(TypeDecorator[Any]):
    """JSON of a record, read as the record.

    A cell that holds none becomes ``Unreadable``, so the query's other rows can be read.
    """

    impl = JSON
    cache_ok = True

    def __init__(self, kind: Any) -> None:
        """``kind``: the class of the record, or the type of a collection."""
        super().__init__(none_as_null=True)
        self.kind = kind

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        """Return the record as plain JSON."""
        return None if value is None else to_json(value)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """Return a function that reads a cell."""
        plain = super().result_processor(dialect, coltype) or (lambda value: value)

        def read(value: Any) -> Any:
            try:
                found = plain(value)
                return None if found is None else from_json(found, self.kind)
            except (TypeError, ValueError):
                return Unreadable(f"{str(value)[:40]!r} is no JSON")
            except StorageError as error:
                return Unreadable(str(error))

        return read


Bytes = BigInteger()
Words = dict[str, str]
Object = dict[str, Any]
LeftOut = tuple[tuple[str, str, str], ...]
STORED: tuple[Any, ...] = (
    *(Facts, Hardware, LeftOut, Object, Outcome, Plan, Script),
    *(Seconds, StudyKey, Submission, TrialReport, Words),
)
"""What a cell may hold as JSON, beside traces."""


class Base(DeclarativeBase):
    """Base class of all tables; every constraint has a name, so that a migration can drop it."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {
        datetime: UtcTime,
        float: Double,
        **{kind: Stored(kind) for kind in STORED},
    }

    def read(self, kind: Callable[..., T], **others: Any) -> T:
        """Return a record: ``others``, and for each other field the column of the same name.

        Raises ``StorageError`` if a cell cannot be read.
        """
        names = (each.name for each in fields(kind) if each.name not in others)  # type: ignore[arg-type]
        return kind(**{name: self.cell(name) for name in names}, **others)

    def cell(self, name: str) -> Any:
        """Return what a column holds; raise ``StorageError`` if it cannot be read."""
        found = getattr(self, name)
        if isinstance(found, Unreadable):
            raise StorageError(f"its {name}: {found.reason}")
        return found


class HeldRow:
    """Columns of a row that a running process may own."""

    owner_host: Mapped[str | None] = mapped_column(String(255))
    owner_pid: Mapped[int | None]
    owner_started: Mapped[float | None]
    lease_until: Mapped[datetime | None]
    """After this time, other hosts consider the owner dead."""

    @property
    def owner(self) -> Owner | None:
        """The process that owns the row or owned it last; ``None`` if there was none."""
        if self.owner_host is None or self.owner_pid is None or self.owner_started is None:
            return None
        return Owner(host=self.owner_host, pid=self.owner_pid, started=self.owner_started)


class StudyRow(HeldRow, Base):
    """A script, its arguments, the hardware and the options of the search."""

    __tablename__ = "study"
    __table_args__ = (UniqueConstraint("fingerprint", "generation"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    generation: Mapped[int]
    """1, and one more for each search with ``--fresh``."""
    script_path: Mapped[str] = mapped_column(Text)
    key: Mapped[StudyKey]
    script: Mapped[Script]
    hardware: Mapped[Hardware]
    budget: Mapped[int] = mapped_column(Bytes)
    versions: Mapped[Words]
    facts: Mapped[Facts | None]
    left_out: Mapped[LeftOut]
    seconds: Mapped[float]
    seconds_by_phase: Mapped[Seconds]
    """The part of ``seconds`` outside of trials, by phase."""
    launches: Mapped[int]
    prefer: Mapped[str] = mapped_column(String(16))
    """Of the last search, as ``--prefer``."""
    created: Mapped[datetime]
    opened: Mapped[datetime]

    def record(self) -> StudyRecord:
        """Return the record; the script's environment only has variables that launchers set."""
        found = self.read(StudyRecord)
        environment = set_by_launchers(found.script.environment)
        return replace(found, script=replace(found.script, environment=environment))


class TrialRow(HeldRow, Base):
    """One measurement of one plan."""

    __tablename__ = "trial"
    __table_args__ = (
        UniqueConstraint("study_id", "number"),
        UniqueConstraint("study_id", "finished_plan"),
        Index("ix_trial_verdict", "verdict"),
        CheckConstraint("state IN ('running', 'finished', 'interrupted')", name="state"),
        CheckConstraint("purpose IN ('search', 'confirm')", name="purpose"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    study_id: Mapped[str] = mapped_column(ForeignKey("study.id"))
    number: Mapped[int]
    purpose: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    plan: Mapped[Plan]
    finished_plan: Mapped[str | None] = mapped_column(Text)
    """The plan of a finished search trial, else null; it makes such a plan unique."""
    launch: Mapped[int]
    budget: Mapped[int] = mapped_column(Bytes)
    versions: Mapped[Words]
    created: Mapped[datetime]
    ended: Mapped[datetime | None]
    verdict: Mapped[str | None] = mapped_column(String(32))
    """As in the report."""
    out_of_memory: Mapped[str | None] = mapped_column(String(32))
    """The phase in which memory ran out, if it did."""
    report: Mapped[TrialReport | None]
    """Its result, with all measurements."""
    trace: Mapped[Trace | None] = mapped_column(Stored(Trace), deferred=True)
    """For the study's reference and confirmation runs; hundreds of kilobytes, loaded on demand."""

    def record(self) -> TrialRecord:
        """Return the record."""
        return self.read(
            TrialRecord,
            study=self.study_id,
            purpose=Purpose(self.purpose),
            state=State(self.state),
            owner=self.owner,
        )

    def traced(self) -> tuple[TrialRecord, Trace]:
        """Return the record of a trial with a trace, and the trace."""
        return self.record(), self.cell("trace")


class EventRow(Base):
    """An event outside of trials."""

    __tablename__ = "event"

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(64))
    payload: Mapped[Object]
    versions: Mapped[Words]
    study_id: Mapped[str | None] = mapped_column(ForeignKey("study.id"))
    trial_id: Mapped[int | None] = mapped_column(ForeignKey("trial.id"))
    created: Mapped[datetime]

    def record(self) -> EventRecord:
        """Return the record."""
        return self.read(EventRecord, study=self.study_id, trial=self.trial_id)


class DiscoveryRow(Base):
    """What was found out about something, such as a script, a function or a machine."""

    __tablename__ = "discovery"
    __table_args__ = (UniqueConstraint("fingerprint", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    """Of the key."""
    name: Mapped[str] = mapped_column(String(64))
    """What it is, of all that is known of the key."""
    key: Mapped[Object]
    content: Mapped[Any] = mapped_column(Stored(Any))
    versions: Mapped[Words]
    updated: Mapped[datetime]

    def record(self) -> DiscoveryRecord:
        """Return the record."""
        return self.read(DiscoveryRecord)


class SearchRow(HeldRow, Base):
    """A search that a user submitted to the service."""

    __tablename__ = "search"
    __table_args__ = (
        CheckConstraint(
            "state IN ('queued', 'starting', 'running', 'finished', 'failed', 'cancelled')",
            name="state",
        ),
        Index("ix_search_state", "state", "id"),
        Index("ix_search_subject", "subject", "state"),
        Index("ix_search_user", "user", "id"),
        Index("ix_search_user_state", "user", "state"),
        Index("ix_search_study_id", "study_id"),
        Index("ix_search_runner", "runner"),
        Index("ix_search_upload", "upload", "state"),
        Index("ix_search_key", "user", "key", unique=True),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    user: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    submission: Mapped[Submission]
    subject: Mapped[str] = mapped_column(String(64))
    study_id: Mapped[str | None] = mapped_column(ForeignKey("study.id"))
    priority: Mapped[int]
    deadline: Mapped[datetime | None]
    gpus: Mapped[int]
    """GPUs that it needs; 1 also on the CPU."""
    upload: Mapped[str | None] = mapped_column(String(64))
    """The digest of its uploaded folder; no foreign key, because uploads are deleted first."""
    runner: Mapped[str | None] = mapped_column(String(32))
    """The actor that took it up last."""
    key: Mapped[str | None] = mapped_column(String(64))
    """The client's name of the submission, which it may send again; null if it gave none."""
    waits_for: Mapped[str | None] = mapped_column(Text)
    cancelled: Mapped[datetime | None]
    attempts: Mapped[int]
    outcome: Mapped[Outcome | None]
    created: Mapped[datetime]
    started: Mapped[datetime | None]
    ended: Mapped[datetime | None]

    def record(self, waits_for: str = "") -> SearchRecord:
        """Return the record; ``waits_for``: why it waits, if the row does not say so."""
        return self.read(
            SearchRecord,
            study=self.study_id,
            state=SearchState(self.state),
            waits_for=self.waits_for or waits_for,
            owner=self.owner,
        )


class NoticeRow(Base):
    """A notice of a search of the service."""

    __tablename__ = "notice"
    __table_args__ = (Index("ix_notice_search_id", "search_id", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    search_id: Mapped[int] = mapped_column(ForeignKey("search.id"))
    kind: Mapped[str] = mapped_column(String(32))
    content: Mapped[Object]

    def record(self) -> NoticeRecord:
        """Return the record."""
        return self.read(NoticeRecord)


class UploadRow(Base):
    """An uploaded working directory, as a compressed archive."""

    __tablename__ = "upload"
    __table_args__ = (Index("ix_upload_created", "created"), Index("ix_upload_user", "user"))

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    content: Mapped[bytes] = mapped_column(LargeBinary)
    user: Mapped[str | None] = mapped_column(String(64))
    """Who sent it last: it counts as that user's. Null for one of an earlier version."""
    size: Mapped[int] = mapped_column(Bytes, server_default="0")
    created: Mapped[datetime]


class TokenRow(Base):
    """A token with which a user talks to the service; only its digest is stored."""

    __tablename__ = "token"
    __table_args__ = (UniqueConstraint("digest"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    user: Mapped[str] = mapped_column(String(64))
    digest: Mapped[str] = mapped_column(String(64))
    created: Mapped[datetime]
    expires: Mapped[datetime | None]
    """From when on it is refused; null for never."""

    def record(self) -> TokenRecord:
        """Return the record."""
        return self.read(TokenRecord)


class AccountRow(Base):
    """What a user of the service may have, and has had."""

    __tablename__ = "account"
    __table_args__ = (UniqueConstraint("uid"),)

    user: Mapped[str] = mapped_column(String(64), primary_key=True)
    gpus: Mapped[int | None]
    """GPUs that the user's searches may hold at a time; null for any number."""
    priority: Mapped[int]
    """The highest priority of the user's searches."""
    queued: Mapped[int | None]
    """Searches of the user that may wait at a time; null for the default."""
    upload_bytes: Mapped[int | None] = mapped_column(Bytes)
    """Bytes of the user's uploaded folders; null for the default."""
    uid: Mapped[int | None]
    """The uid of the user's scripts; null before the first of them has run under it."""
    gpu_seconds: Mapped[float]


class AuditRow(Base):
    """Who did what and when."""

    __tablename__ = "audit"
    __table_args__ = (Index("ix_audit_user", "user", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    user: Mapped[str] = mapped_column(String(64))
    action: Mapped[str] = mapped_column(String(32))
    target: Mapped[str] = mapped_column(Text)
    address: Mapped[str] = mapped_column(String(64))
    created: Mapped[datetime]

    def record(self) -> AuditRecord:
        """Return the record."""
        return self.read(AuditRecord)
