"""Opens the database: the URL, SQLite's settings, the migrations, and errors in one clear line.

The file is shared with Optuna, which owns ``alembic_version``: ours is ``VERSION_TABLE``.
"""

from __future__ import annotations

import sqlite3
import time
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
from autofit.storage.url import DEFAULT, to_url

HEAD = "0004"
"""The newest revision in ``migrations/versions``."""

VERSION_TABLE = "autofit_alembic_version"

BUSY_SECONDS = 30.0
"""How long to wait for another process that writes."""


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
    return str(sqlite_file(url) or url.render_as_string(hide_password=True))


def open_engine(url: URL) -> Engine:
    """Return an engine for ``url``, not yet connected; raise ``StorageError`` without a driver."""
    sqlite = url.get_backend_name() == "sqlite"
    try:
        arguments: dict[str, Any] = {"timeout": BUSY_SECONDS} if sqlite else {}
        engine = create_engine(url, connect_args=arguments)
    except (NoSuchModuleError, ImportError) as error:
        raise StorageError(
            f"the store cannot be at {show(url)}: no database driver for {url.drivername!r} is"
            f" installed; install one, or use SQLite, such as {DEFAULT}"
        ) from error
    if sqlite:
        event.listen(engine, "connect", _on_connect)
        event.listen(engine, "begin", _on_begin)
    return engine


def writing(engine: Engine) -> Engine:
    """Return ``engine`` for transactions that write: they take SQLite's write lock at once.

    One that begins by reading could find its snapshot stale when it comes to write, and that
    fails without waiting.
    """
    return engine.execution_options(autofit_writes=True)


def _on_connect(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # BEGIN is ours to send: _on_begin
    connection.execute("PRAGMA foreign_keys=ON")
    _use_wal(connection)


def _on_begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("autofit_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


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


def _advice(url: URL, cause: str) -> str:
    path = sqlite_file(url)
    if "unable to open" in cause and path is not None:
        if not path.parent.is_dir():
            return f"there is no directory {path.parent}: make it, or give another --storage"
        return "its directory must be writable: make it so, or give another --storage"
    if "readonly" in cause:
        return "it must be writable: make it so, or give another --storage"
    if "not a database" in cause:
        return "it is some other file: move it away, or give another --storage"
    if "locked" in cause:
        return f"another process kept it for {BUSY_SECONDS:.0f} s: end that one, or try again"
    if "full" in cause:
        return "free some space and run the same command again"
    return "give another --storage if it stays so"
