"""Opens the database: the URL, each database's settings, the migrations, errors in one clear line.

The file is shared with Optuna, which owns ``alembic_version``: ours is ``VERSION_TABLE``.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    String,
    column,
    create_engine,
    event,
    inspect,
    select,
    table,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from autofit.exceptions import StorageError
from autofit.storage.url import DEFAULT, to_url, without_password

HEAD = "0007"
"""The newest revision in ``migrations/versions``."""

VERSION_TABLE = "autofit_alembic_version"

BUSY_SECONDS = 30.0
"""How long to wait for another process that writes."""

CONNECT_SECONDS = 10
"""How long to wait for a database server to answer."""

WRITING = int.from_bytes(b"autofit")
"""PostgreSQL's advisory lock of a transaction of ours that writes; of one database alone."""


def parse(storage: str) -> URL:
    """Return the URL of ``storage``, a path or an SQLAlchemy URL; raise ``StorageError``.

    An SQLite path is made absolute, so that a later change of directory opens no other file.
    """
    try:
        url = make_url(to_url(storage))
    except ArgumentError as error:
        raise StorageError(
            f"the store cannot be at {storage!r}: give a path or an SQLAlchemy URL,"
            f" such as {DEFAULT}"
        ) from error
    path = sqlite_file(url)
    return url if path is None else url.set(database=str(path))


def sqlite_file(url: URL) -> Path | None:
    """Return the absolute path of an SQLite file, or ``None``: in memory, or another database."""
    name = url.database or ""
    if url.get_backend_name() != "sqlite" or name in ("", ":memory:") or name.startswith("file:"):
        return None
    return Path(name).absolute()


def show(url: URL) -> str:
    """Return how a message names the store: its path, or its URL without the password."""
    return str(sqlite_file(url) or without_password(url.render_as_string(hide_password=True)))


def make_private(path: Path) -> None:
    """Make an empty SQLite file that its owner alone may read, unless there is one.

    It will hold command lines and environments. SQLite gives the files beside it, ``-wal`` and
    ``-shm``, the same mode. What cannot be made here SQLite will complain about.
    """
    with suppress(OSError):
        os.close(os.open(path.resolve(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def open_engine(url: URL) -> Engine:
    """Return an engine for ``url``, not yet connected; raise ``StorageError`` without a driver."""
    backend = url.get_backend_name()
    try:
        if backend == "sqlite":
            engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS})
            event.listen(engine, "connect", _on_connect)
            event.listen(engine, "begin", _begin_in_sqlite)
        elif backend == "postgresql":
            # A server may have been restarted since: a connection is tried before it is used.
            engine = create_engine(url, connect_args=_patience(url), pool_pre_ping=True)
            event.listen(engine, "begin", _begin_in_postgresql)
        else:
            engine = create_engine(url)
    except (NoSuchModuleError, ImportError) as error:
        raise StorageError(
            f"the store cannot be at {show(url)}: no database driver for {url.drivername!r} is"
            f" installed; {_driver(backend)}, or use SQLite, such as {DEFAULT}"
        ) from error
    return engine


def _driver(backend: str) -> str:
    if backend == "postgresql":
        return "pip install 'autofit-torch[postgresql]' brings that of postgresql+psycopg://..."
    return "install one"


def _patience(url: URL) -> dict[str, Any]:
    """Return how long a connection may take to be made, where the URL does not say it."""
    if not url.get_driver_name().startswith("psycopg") or "connect_timeout" in url.query:
        return {}
    return {"connect_timeout": CONNECT_SECONDS}


def writing(engine: Engine) -> Engine:
    """Return ``engine`` for transactions that write: one at a time, each from its beginning.

    In SQLite one that begins by reading could find its snapshot stale when it comes to write, and
    that fails without waiting. In PostgreSQL two could each find that there is no such row yet.
    """
    return engine.execution_options(autofit_writes=True)


def _on_connect(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # BEGIN is ours to send: _begin_in_sqlite
    connection.execute("PRAGMA foreign_keys=ON")
    _use_wal(connection)


def _begin_in_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if _writes(connection) else "BEGIN")


def _begin_in_postgresql(connection: Connection) -> None:
    if _writes(connection):
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(1000 * BUSY_SECONDS)}")
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITING})")


@contextmanager
def alone(engine: Engine) -> Iterator[None]:
    """Let one process at a time in: by a lock of PostgreSQL's, or of the folder of a file.

    Not the lock of a transaction that writes: what is done within may write by other connections.
    """
    if engine.dialect.name != "postgresql":
        with _folder_alone(Path(engine.url.database or "").absolute().parent):
            yield
        return
    with engine.begin() as connection:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITING + 1})")
        yield


@contextmanager
def _folder_alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, where its file system has one."""
    held = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _writes(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get("autofit_writes", False))


def _use_wal(connection: sqlite3.Connection) -> None:
    """Let readers go on while one writes; https://www.sqlite.org/wal.html."""
    deadline = time.monotonic() + BUSY_SECONDS
    while connection.execute("PRAGMA journal_mode").fetchone()[0] == "delete":
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            # The switch does not wait for another process by itself.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def revision(connection: Connection) -> str | None:
    """Return the revision of our tables; ``None`` when there are none yet."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    version = column("version_num", String())
    return connection.scalar(select(version).select_from(table(VERSION_TABLE, version)))


def migrate(engine: Engine) -> None:
    """Bring our tables to ``HEAD`` in one transaction; raise ``StorageError`` if they are newer."""
    with engine.connect() as connection:
        if revision(connection) == HEAD:
            return
    # Imported here: half a second that only a new or old store has to pay.
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", migrations_folder().replace("%", "%%"))
    try:
        with writing(engine).begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except CommandError as error:
        raise StorageError(
            f"the store {show(engine.url)} was written by a newer version of autofit;"
            " upgrade autofit, or give another --storage"
        ) from error


def migrations_folder() -> str:
    """Return the folder Alembic reads."""
    return str(Path(__file__).parent / "migrations")


def explain(url: URL, error: SQLAlchemyError) -> str:
    """Return one line that says what went wrong with the store at ``url`` and what to do."""
    # orig: the driver's own words, without the statement and the link SQLAlchemy adds.
    cause = str(getattr(error, "orig", None) or error).splitlines()[0]
    return f"the store {show(url)} cannot be used: {cause}; {_advice(url, cause)}"


_ADVICE = {
    "readonly": "it must be writable: make it so, or give another --storage",
    "not a database": "it is some other file: move it away, or give another --storage",
    "locked": "another process kept it for {busy:.0f} s: end that one, or try again",
    "lock timeout": "another process kept it for {busy:.0f} s: end that one, or try again",
    "disk I/O error": "look at the disk it is on and at its free space, and run it again",
    "full": "free some space and run the same command again",
    "No space left": "free some space and run the same command again",
    "does not exist": "make it there (createdb, createuser), or give another --storage",
    "authentication failed": "give the password in PGPASSWORD, ~/.pgpass or the URL",
    "no password": "give the password in PGPASSWORD, ~/.pgpass or the URL",
    "permission denied": "its user must be allowed to make tables: grant it, or give another one",
    "connection": "check that the server runs and that its host and port are these",
    "host name": "check that the server runs and that its host and port are these",
}
"""What to do, by a part of the driver's words; the first that is found counts."""


def _advice(url: URL, cause: str) -> str:
    path = sqlite_file(url)
    if "unable to open" in cause and path is not None:
        if not path.parent.is_dir():
            return f"there is no directory {path.parent}: make it, or give another --storage"
        return "its directory must be writable: make it so, or give another --storage"
    known = (text for words, text in _ADVICE.items() if words in cause)
    return next(known, "give another --storage if it stays so").format(busy=BUSY_SECONDS)
