"""Opens the database: parses its URL, migrates its tables and explains errors in one line.

Optuna uses the same database and its own table ``alembic_version``; autofit's is ``VERSION_TABLE``.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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

from autofit.exceptions import StorageError, UsageError
from autofit.storage.url import DEFAULT, to_url, without_password

HEAD = "1"
"""The newest revision in ``migrations/versions``."""

VERSION_TABLE = "autofit_alembic_version"

BUSY_SECONDS = 30.0
"""Seconds to wait for another process that writes."""

CONNECT_SECONDS = 10
"""Seconds to wait for an answer of a database server."""

WRITING = int.from_bytes(b"autofit")
"""Key of PostgreSQL's advisory lock for writing transactions of autofit, in one database."""


def parse(storage: str) -> URL:
    """Return the URL of ``storage``, a path or an SQLAlchemy URL.

    An SQLite path becomes absolute, so that a later change of directory does not change the file.
    Raises ``StorageError`` if ``storage`` is neither.
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
    """Return the absolute path of an SQLite file; ``None`` for other databases and in memory."""
    name = url.database or ""
    if url.get_backend_name() != "sqlite" or name in ("", ":memory:") or name.startswith("file:"):
        return None
    return Path(name).absolute()


def show(url: URL) -> str:
    """Return the store's name for messages: its path, or its URL without the password."""
    return str(sqlite_file(url) or without_password(url.render_as_string(hide_password=True)))


def make_private(path: Path) -> None:
    """Make an empty SQLite file that only its owner may read, unless the file exists.

    The store contains command lines and environments. SQLite gives its files ``-wal`` and ``-shm``
    the same mode. If the file cannot be made, SQLite reports the error later.
    """
    with suppress(OSError):
        os.close(os.open(path.resolve(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def open_engine(url: URL) -> Engine:
    """Return an engine for ``url``, not yet connected; raise ``UsageError`` without a driver."""
    backend = url.get_backend_name()
    try:
        if backend == "sqlite":
            engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS})
            event.listen(engine, "connect", _on_connect)
            event.listen(engine, "begin", _begin_in_sqlite)
        elif backend == "postgresql":
            # The server may have been restarted, so a pooled connection is tested before each use.
            psycopg = url.get_driver_name().startswith("psycopg")
            given = not psycopg or "connect_timeout" in url.query
            timeout = {} if given else {"connect_timeout": CONNECT_SECONDS}
            engine = create_engine(url, connect_args=timeout, pool_pre_ping=True)
            event.listen(engine, "begin", _begin_in_postgresql)
        else:
            engine = create_engine(url)
    except (NoSuchModuleError, ImportError) as error:
        raise UsageError(
            f"the store cannot be at {show(url)}: no database driver for {url.drivername!r} is"
            f" installed; {_driver(backend)}, or use SQLite, such as {DEFAULT}"
        ) from error
    return engine


def _driver(backend: str) -> str:
    if backend == "postgresql":
        return "pip install 'autofit-torch[postgresql]' installs that of postgresql+psycopg://..."
    return "install one"


def writing(engine: Engine) -> Engine:
    """Return ``engine`` for writing transactions, which lock the database from their beginning.

    In SQLite, a transaction that reads first fails at its first write if another has written in
    between. In PostgreSQL, two transactions could both find that a row is missing and add it.
    """
    return engine.execution_options(autofit_writes=True)


def _on_connect(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # _begin_in_sqlite sends BEGIN
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
    """Let only one process at a time into this context.

    The lock is PostgreSQL's, or one of the SQLite file's folder. It is another lock than that of
    writing transactions, because the context's body may write with other connections.
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
    """Hold the lock of a folder, if its file system supports locks."""
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
    """Let processes read while another writes: https://www.sqlite.org/wal.html."""
    deadline = time.monotonic() + BUSY_SECONDS
    while connection.execute("PRAGMA journal_mode").fetchone()[0] == "delete":
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            # SQLite's busy timeout does not apply to this statement.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def revision(connection: Connection) -> str | None:
    """Return the revision of autofit's tables; ``None`` if there are none yet."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    version = column("version_num", String())
    return connection.scalar(select(version).select_from(table(VERSION_TABLE, version)))


def migrate(engine: Engine) -> None:
    """Migrate autofit's tables to ``HEAD`` in one transaction.

    Raises ``StorageError`` if another version of autofit made them: a newer one, or one before the
    first release.
    """
    with engine.connect() as connection:
        if revision(connection) == HEAD:
            return
    # This import takes half a second, which only a new or old store needs.
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
            f"the store {show(engine.url)} was written by another version of autofit:"
            " upgrade autofit, or give another --storage"
        ) from error


def migrations_folder() -> str:
    """Return the folder of Alembic's migrations."""
    return str(Path(__file__).parent / "migrations")


def explain(url: URL, error: SQLAlchemyError) -> str:
    """Return one line that says what is wrong with the store at ``url`` and what to do."""
    # ``orig`` is the driver's own error, without the statement and the link that SQLAlchemy adds.
    cause = str(getattr(error, "orig", None) or error).splitlines()[0]
    return f"the store {show(url)} cannot be used: {cause}; {_advice(url, cause)}"


_ADVICE = {
    "readonly": "make it writable, or give another --storage",
    "not a database": "it is another kind of file: move it away, or give another --storage",
    "locked": "another process locked it for {busy:.0f} s: end that process, or try again",
    "lock timeout": "another process locked it for {busy:.0f} s: end that process, or try again",
    "disk I/O error": "check its disk and the free space there, and run the command again",
    "full": "free some space and run the same command again",
    "No space left": "free some space and run the same command again",
    "does not exist": "create it (createdb, createuser), or give another --storage",
    "authentication failed": "give the password in PGPASSWORD, ~/.pgpass or the URL",
    "no password": "give the password in PGPASSWORD, ~/.pgpass or the URL",
    "permission denied": "let its user create tables (GRANT), or give another user",
    "connection": "check that the server runs and that host and port are right",
    "host name": "check that the server runs and that host and port are right",
}
"""Advice by a part of the driver's message; the first that matches counts."""


def _advice(url: URL, cause: str) -> str:
    path = sqlite_file(url)
    if "unable to open" in cause and path is not None:
        if not path.parent.is_dir():
            return f"there is no directory {path.parent}: make it, or give another --storage"
        return "make its directory writable, or give another --storage"
    known = (text for words, text in _ADVICE.items() if words in cause)
    return next(known, "if it happens again, give another --storage").format(busy=BUSY_SECONDS)
