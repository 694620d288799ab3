"""The database tables. Only this package uses rows; ``migrations`` creates the tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

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
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship


class Moment(TypeDecorator[datetime]):
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
    """The beginning of a cell whose JSON is invalid, for instance because somebody edited it."""

    beginning: str


class Json(TypeDecorator[Any]):
    """JSON; an invalid cell becomes ``Unreadable``, so the query's other rows can be read."""

    impl = JSON
    cache_ok = True

    def __init__(self) -> None:
        super().__init__(none_as_null=True)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any] | None:
        """Return a function that reads a cell as the dialect does, or returns ``Unreadable``."""
        read = super().result_processor(dialect, coltype)
        if read is None:
            return None

        def read_or_mark(value: Any) -> Any:
            try:
                return read(value)
            except (TypeError, ValueError):
                return Unreadable(str(value)[:40])

        return read_or_mark


Bytes = BigInteger()


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
        datetime: Moment,
        float: Double,
        dict[str, Any]: Json(),
        list[Any]: Json(),
    }


class Held:
    """Columns of a row that a running process may own."""

    owner_host: Mapped[str | None] = mapped_column(String(255))
    owner_pid: Mapped[int | None]
    owner_started: Mapped[float | None]
    lease_until: Mapped[datetime | None]
    """After this time, other hosts consider the owner dead."""


class Study(Held, Base):
    """A script, its arguments, the hardware and the options of the search."""

    __tablename__ = "study"
    __table_args__ = (UniqueConstraint("fingerprint", "generation"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    generation: Mapped[int]
    """1, and one more for each search with ``--fresh``."""
    script_path: Mapped[str] = mapped_column(Text)
    key: Mapped[dict[str, Any]]
    script: Mapped[dict[str, Any]]
    hardware: Mapped[dict[str, Any]]
    budget: Mapped[int] = mapped_column(Bytes)
    versions: Mapped[dict[str, Any]]
    facts: Mapped[dict[str, Any] | None] = mapped_column(Json())
    left_out: Mapped[list[Any]]
    seconds: Mapped[float]
    seconds_by_phase: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    """The part of ``seconds`` outside of trials, by phase."""
    launches: Mapped[int]
    prefer: Mapped[str] = mapped_column(String(16), server_default="fidelity")
    """Of the last search, as ``--prefer``."""
    created: Mapped[datetime]
    opened: Mapped[datetime]


class Trial(Held, Base):
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
    plan: Mapped[dict[str, Any]]
    finished_plan: Mapped[str | None] = mapped_column(String(64))
    """Digest of the plan of a finished search trial, else null; it makes such a plan unique."""
    launch: Mapped[int]
    budget: Mapped[int] = mapped_column(Bytes)
    versions: Mapped[dict[str, Any]]
    optuna_number: Mapped[int | None]
    """The number of the trial in Optuna's study; no foreign key."""
    created: Mapped[datetime]
    ended: Mapped[datetime | None]

    position: Mapped[int | None]
    verdict: Mapped[str | None] = mapped_column(String(32))
    reason: Mapped[str | None] = mapped_column(Text)
    best: Mapped[dict[str, Any] | None] = mapped_column(Json())
    out_of_memory: Mapped[dict[str, Any] | None] = mapped_column(Json())
    blamed: Mapped[str | None] = mapped_column(String(64))
    traceback: Mapped[str | None] = mapped_column(Text)
    startup_seconds: Mapped[float | None]
    seconds_by_phase: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    trace: Mapped[dict[str, Any] | None] = mapped_column(Json(), deferred=True)
    """For the study's reference and confirmation runs; hundreds of kilobytes, loaded on demand."""

    measurements: Mapped[list[Measurement]] = relationship(
        order_by="Measurement.position", lazy="selectin"
    )


class Measurement(Base):
    """The figures of a plan at one micro-batch size."""

    __tablename__ = "measurement"
    __table_args__ = (UniqueConstraint("trial_id", "position"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("trial.id"))
    position: Mapped[int]
    """0, 1, 2, ... in the order of measurement; the fastest size last."""
    micro_batch: Mapped[int]
    effective_batch: Mapped[int]
    step_seconds: Mapped[list[Any]]
    peak_allocated: Mapped[int] = mapped_column(Bytes)
    peak_reserved: Mapped[int] = mapped_column(Bytes)
    peak_device: Mapped[int] = mapped_column(Bytes)
    allocation_retries: Mapped[int]
    allocations_refused: Mapped[int] = mapped_column(server_default="0")
    data_wait: Mapped[float]
    losses: Mapped[list[Any]]
    compile_seconds: Mapped[float] = mapped_column(server_default="0")
    rank_peaks: Mapped[list[Any]] = mapped_column(server_default="[]")
    checkpointing: Mapped[str | None] = mapped_column(String(16))
    """The level of ``checkpointing``; null in measurements of older versions."""
    probed: Mapped[bool] = mapped_column(server_default=false())


class Event(Base):
    """An event outside of trials."""

    __tablename__ = "event"

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(64))
    payload: Mapped[dict[str, Any]]
    versions: Mapped[dict[str, Any]]
    study_id: Mapped[str | None] = mapped_column(ForeignKey("study.id"))
    trial_id: Mapped[int | None] = mapped_column(ForeignKey("trial.id"))
    created: Mapped[datetime]


class Fitted(Base):
    """The setting that held in a decorated function, for one shape of arguments and one device."""

    __tablename__ = "fitted"
    __table_args__ = (UniqueConstraint("fingerprint"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    key: Mapped[dict[str, Any]]
    kept: Mapped[dict[str, Any]]
    versions: Mapped[dict[str, Any]]
    updated: Mapped[datetime]


class Evidence(Base):
    """A verified property of a script: its context, its key, and the result."""

    __tablename__ = "evidence"
    __table_args__ = (UniqueConstraint("context", "key"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    context: Mapped[str] = mapped_column(String(64))
    key: Mapped[str] = mapped_column(String(64))
    content: Mapped[str] = mapped_column(Text)
    """JSON that the harness writes and reads."""
    created: Mapped[datetime]


class Inspection(Base):
    """What the last check of a script found to hold the memory."""

    __tablename__ = "inspection"
    __table_args__ = (UniqueConstraint("fingerprint"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    key: Mapped[dict[str, Any]]
    content: Mapped[dict[str, Any]]
    versions: Mapped[dict[str, Any]]
    updated: Mapped[datetime]


class MeasuredBandwidth(Base):
    """How fast the ranks of a machine communicate, by kind of collective, in bytes a second."""

    __tablename__ = "bandwidth"
    __table_args__ = (UniqueConstraint("gpu", "link", "torch", "ranks"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    gpu: Mapped[str] = mapped_column(String(255))
    """The driver's name of the model; without a GPU, that of the processor."""
    link: Mapped[str] = mapped_column(String(16))
    """``nvlink``, ``pcie``, or empty if unknown."""
    torch: Mapped[str] = mapped_column(String(64))
    """The version of PyTorch."""
    ranks: Mapped[int]
    all_reduce: Mapped[float]
    all_gather: Mapped[float]
    reduce_scatter: Mapped[float]
    updated: Mapped[datetime]


class Search(Held, Base):
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
    submission: Mapped[dict[str, Any]]
    subject: Mapped[str] = mapped_column(String(64))
    study_id: Mapped[str | None] = mapped_column(ForeignKey("study.id"))
    priority: Mapped[int] = mapped_column(server_default="0")
    deadline: Mapped[datetime | None]
    gpus: Mapped[int] = mapped_column(server_default="1")
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
    outcome: Mapped[dict[str, Any] | None] = mapped_column(Json())
    created: Mapped[datetime]
    started: Mapped[datetime | None]
    ended: Mapped[datetime | None]


class Notice(Base):
    """A notice of a search of the service."""

    __tablename__ = "notice"
    __table_args__ = (Index("ix_notice_search_id", "search_id", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    search_id: Mapped[int] = mapped_column(ForeignKey("search.id"))
    kind: Mapped[str] = mapped_column(String(32))
    content: Mapped[dict[str, Any]]


class Upload(Base):
    """An uploaded working directory, as a compressed archive."""

    __tablename__ = "upload"
    __table_args__ = (Index("ix_upload_created", "created"), Index("ix_upload_user", "user"))

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    content: Mapped[bytes] = mapped_column(LargeBinary)
    user: Mapped[str | None] = mapped_column(String(64))
    """Who sent it last: it counts as that user's. Null for one of an earlier version."""
    size: Mapped[int] = mapped_column(Bytes, server_default="0")
    created: Mapped[datetime]


class Token(Base):
    """A token with which a user talks to the service; only its digest is stored."""

    __tablename__ = "token"
    __table_args__ = (UniqueConstraint("digest"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    user: Mapped[str] = mapped_column(String(64))
    digest: Mapped[str] = mapped_column(String(64))
    created: Mapped[datetime]
    expires: Mapped[datetime | None]
    """From when on it is refused; null for never."""


class Account(Base):
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


class Audit(Base):
    """Who did what and when."""

    __tablename__ = "audit"
    __table_args__ = (Index("ix_audit_user", "user", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    user: Mapped[str] = mapped_column(String(64))
    action: Mapped[str] = mapped_column(String(32))
    target: Mapped[str] = mapped_column(Text)
    address: Mapped[str] = mapped_column(String(64))
    created: Mapped[datetime]
