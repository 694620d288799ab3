"""Opening the store: migrations, Optuna in the same file, many processes, clear errors."""

import logging
import os
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Column, Connection, Engine, event, inspect, text

from autofit.exceptions import AutofitError, StorageError, UsageError
from autofit.plan import Plan
from autofit.storage import (
    Owner,
    Store,
    StudyRecord,
    default_url,
    engine,
    models,
)
from autofit.storage.url import without_password
from autofit.tuning.optuna_study import Dashboard
from autofit.worker.records.trials import Script, TrialReport

pytestmark = pytest.mark.quick

Open = Callable[..., StudyRecord]
Report = Callable[..., TrialReport]
OURS = {
    *("study", "trial", "event", "discovery"),
    *("search", "notice", "upload", "token", "account", "audit"),
    engine.VERSION_TABLE,
}


@contextmanager
def connected(location: str) -> Iterator[Connection]:
    """A transaction in the store's database, as anybody may open one."""
    opened = engine.open_engine(engine.parse(location))
    with opened.begin() as connection:
        yield connection
    opened.dispose()


def tables(location: str) -> set[str]:
    with connected(location) as connection:
        return set(inspect(connection).get_table_names())


# --- migrations -------------------------------------------------------------------------------


def test_an_empty_store_is_migrated_to_the_newest_revision(store: Store, location: str) -> None:
    config = Config()
    config.set_main_option("script_location", engine.migrations_folder())
    assert ScriptDirectory.from_config(config).get_current_head() == engine.HEAD
    assert tables(location) == OURS


def default_differs(
    _context: object, _inspected: object, column: Column[Any], there: str | None, *said: object
) -> bool | None:
    """Compare defaults of JSON by their text in PostgreSQL, which has no equality for it."""
    if there is None or not there.endswith("::json"):
        return None
    return there != f"'{said[-1]}'::json"


def test_the_migrations_make_what_the_models_say(store: Store) -> None:
    with connected(store.url) as connection:
        options = {
            "version_table": engine.VERSION_TABLE,
            "compare_server_default": default_differs,
            "include_name": lambda name, kind, _: kind != "table" or name in OURS,
        }
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, models.Base.metadata) == []


def test_a_store_of_another_version_is_refused_untouched(store: Store, location: str) -> None:
    store.close()
    with connected(location) as connection:
        connection.execute(text(f"UPDATE {engine.VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(StorageError, match="another version of autofit: upgrade autofit"):
        Store(location)


def test_a_migration_that_fails_leaves_nothing(location: str) -> None:
    with connected(location) as connection:
        connection.execute(text("CREATE TABLE trial (theirs INTEGER)"))
    with pytest.raises(StorageError, match=r'trial"? already exists'):
        Store(location)
    assert tables(location) == {"trial"}


def test_sqlite_is_set_up(path: Path) -> None:
    with Store(str(path)) as store, connected(store.url) as connection:
        pragma = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys", "busy_timeout")
        }
    assert pragma == {"journal_mode": "wal", "foreign_keys": 1, "busy_timeout": 30_000}


def test_a_new_file_is_its_owners_alone(path: Path) -> None:
    """It holds command lines and environments; a file that is there keeps its mode."""
    old_mask = os.umask(0o022)
    try:
        with Store(str(path)) as store:
            store.record_event("tick", {})
            files = [path, path.with_name("autofit.db-wal"), path.with_name("autofit.db-shm")]
            assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 3
        path.chmod(0o640)
        with Store(str(path)):
            assert stat.S_IMODE(path.stat().st_mode) == 0o640
    finally:
        os.umask(old_mask)


# --- Optuna in the same database --------------------------------------------------------------


def use_optuna(url: str, study: str) -> None:
    import optuna

    optuna.logging.set_verbosity(logging.ERROR)
    made = optuna.create_study(storage=optuna.storages.RDBStorage(url), study_name=study)
    trial = made.ask()
    trial.suggest_categorical("precision", ["as_is", "bf16"])
    made.tell(trial, 1.0)


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_optuna_lives_in_the_same_database(
    location: str, first: str, opening: Open, plan: Plan, report: Report
) -> None:
    if first == "theirs":
        use_optuna(location, "before")
    with Store(location) as store:
        study = opening(store)
        use_optuna(store.url, "between")
        (trial,) = store.add_trials(study, [plan], launch=0, owner=Owner.current())
        store.finish(trial, report(plan))
    use_optuna(location, "after")
    with Store(location) as again:
        assert again.trials(study)[0].report == report(plan)
    assert {"alembic_version", "trials", *OURS} <= tables(location)


MAKE_OPTUNAS = """
import sys
import optuna
from autofit.storage import Store
with Store(sys.argv[1]) as store:
    print("there", flush=True)
    sys.stdin.readline()
    with store.alone():
        optuna.storages.RDBStorage(store.url)
"""


def test_searches_that_begin_at_once_make_optunas_tables_once(location: str) -> None:
    command = [sys.executable, "-c", MAKE_OPTUNAS, location]
    ran = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in ran:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
    for process in ran:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.close()
    assert [process.wait(timeout=60) for process in ran] == [0] * 3


@pytest.mark.parametrize("room", [0, 10, 20])
def test_a_store_that_fills_up_while_optunas_tables_are_made(
    path: Path, opening: Open, room: int
) -> None:
    """``room``: 4 KiB pages that are left; SQLite's own limit acts as a full disk does."""

    def limit(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute(f"PRAGMA max_page_count={pages + room}")

    with Store(str(path)) as store:
        study = opening(store)
        with connected(store.url) as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        event.listen(Engine, "connect", limit)
        try:
            with pytest.raises(StorageError, match=r"is full; free some space and run") as caught:
                Dashboard(store, study, horizon=1)
        finally:
            event.remove(Engine, "connect", limit)
        assert "\n" not in str(caught.value)
        Dashboard(store, study, horizon=1)


# --- many at once -----------------------------------------------------------------------------

OPEN_AND_COUNT = """
import sys
from autofit.storage import Store
sys.stdin.readline()
with Store(sys.argv[1]) as store:
    for number in range(20):
        store.record_event("tick", {"number": number})
"""


def test_processes_that_open_a_new_store_at_once_all_get_it(location: str) -> None:
    command = [sys.executable, "-c", OPEN_AND_COUNT, location]
    ran = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(4)]
    for process in ran:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
    assert [process.wait(timeout=60) for process in ran] == [0] * 4
    with Store(location) as store:
        assert len(store.events("tick")) == 80


def test_opening_waits_for_a_writer_to_switch_the_file_to_wal(path: Path) -> None:
    """SQLite refuses the switch at once while Optuna, say, writes to its new file."""
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE theirs (x INTEGER)")
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, other.execute, ["COMMIT"])
    release.start()
    with Store(str(path)) as store:
        assert store.studies() == ()
    release.join()
    other.close()


def test_readers_see_whole_trials_while_one_writes(
    store: Store, study: StudyRecord, plan: Plan, report: Report
) -> None:
    """A finished trial has its report and both measurements in every snapshot."""
    finished = threading.Event()
    torn: list[object] = []
    seen: list[int] = []

    def read() -> None:
        with Store(store.url) as mine:
            while not finished.is_set():
                done = [trial for trial in mine.trials(study) if trial.report]
                seen.append(len(done))
                torn.extend(t for t in done if t.report and len(t.report.measurements) != 2)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for size in range(1, 31):
        sized = plan.replace(micro_batch=str(size))
        (trial,) = store.add_trials(study, [sized], launch=size, owner=Owner.current())
        store.finish(trial, report(sized))
    finished.set()
    for reader in readers:
        reader.join(timeout=30)
    assert not torn
    assert seen
    assert len(store.trials(study)) == 30


OPEN_A_STUDY = """
import sys
from autofit.storage import Store, StudyKey
from autofit.strategies import Hardware
from autofit.worker.records.trials import Script
script = Script(target="train.py", cwd=sys.argv[2])
with Store(sys.argv[1]) as store:
    sys.stdin.readline()
    for number in range(10):
        key = StudyKey.of(script, gpu="CPU", gpus=number, memory=None, allow="exact")
        study = store.open_study(
            key, script=script, budget=1, versions={},
            hardware=Hardware(device="cpu", name="CPU", total_bytes=1),
        )
        print(study.id, store.next_launch(study))
"""


def test_two_that_open_the_same_new_study_get_the_same(location: str, script: Script) -> None:
    """Neither finds a row to wait for: only one at a time may look, and write what is missing."""
    command = [sys.executable, "-c", OPEN_A_STUDY, location, script.cwd]
    ran = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [each.communicate("\n", timeout=60)[0].splitlines() for each in ran]
    assert [each.returncode for each in ran] == [0, 0]
    first, second = ([line.split()[0] for line in each] for each in said)
    assert first == second
    assert len(set(first)) == 10
    launches = sorted(line.split()[1] for each in said for line in each)
    assert launches == ["0"] * 10 + ["1"] * 10


def test_threads_may_share_a_store(store: Store, study: StudyRecord) -> None:
    """The heartbeat runs beside the controller."""
    numbers: list[int] = []

    def take() -> None:
        numbers.extend(store.next_launch(study) for _ in range(20))

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(numbers) == list(range(60))


# --- where it is ------------------------------------------------------------------------------


def test_the_default_is_a_file_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOFIT_STORAGE", raising=False)
    assert default_url() == "sqlite:///autofit.db"
    with Store() as store:
        assert store.url == f"sqlite:///{tmp_path}/autofit.db"


def test_the_environment_names_a_url_or_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOFIT_STORAGE", "runs.db")
    assert default_url() == f"sqlite:///{tmp_path}/runs.db"
    monkeypatch.setenv("AUTOFIT_STORAGE", "postgresql://host/db")
    assert default_url() == "postgresql://host/db"


def test_a_change_of_directory_opens_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opening: Open
) -> None:
    monkeypatch.chdir(tmp_path)
    with Store("sqlite:///autofit.db") as store:
        (tmp_path / "else").mkdir()
        monkeypatch.chdir(tmp_path / "else")
        opening(store)
        with Store(store.url) as again:
            assert len(again.studies()) == 1
    assert not list((tmp_path / "else").iterdir())


def test_reading_makes_no_file_where_there_is_none(path: Path) -> None:
    with pytest.raises(StorageError, match=r"there is no store at .*autofit\.db: search first"):
        Store(str(path), create=False)
    assert not path.exists()


# --- errors -----------------------------------------------------------------------------------


def message(storage: str, error: type[AutofitError] = StorageError) -> str:
    with pytest.raises(error) as caught:
        Store(storage)
    text = str(caught.value)
    assert "\n" not in text
    assert "sqlalche.me" not in text
    return text


def test_a_file_that_is_no_database(path: Path) -> None:
    path.write_text("notes\n" * 1000)
    assert "file is not a database; it is another kind of file: move it" in message(str(path))
    assert path.read_text() == "notes\n" * 1000


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    text = message(str(tmp_path / "gone" / "autofit.db"))
    assert f"there is no directory {tmp_path}/gone: make it" in text


def test_a_directory_that_cannot_be_written() -> None:
    """Nobody makes files in /proc, root included."""
    assert "/proc/autofit.db" in message("/proc/autofit.db")
    assert "make its directory writable" in message("/proc/autofit.db")


@pytest.mark.parametrize("storage", ["://", "sqlite//:x://", "", "what?.db"])
def test_what_is_no_url(storage: str) -> None:
    assert f"the store cannot be at {storage!r}" in message(storage)


def test_a_database_nobody_knows_and_a_driver_that_is_not_installed() -> None:
    said = message("banana://host/db", UsageError)
    assert "no database driver for 'banana' is installed" in said
    text = message("mysql+oursql://me:secret@host/db", UsageError)
    assert "no database driver" in text
    assert "secret" not in text


def test_a_store_kept_locked_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BUSY_SECONDS", 0.1)
    with Store(str(path)) as store, sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        assert store.events() == ()
        with pytest.raises(StorageError, match=r"database is locked; another process locked it"):
            store.record_event("tick", {})
        other.execute("ROLLBACK")
        store.record_event("tick", {})


def test_a_writer_waits_for_another_and_says_so_in_the_end(
    postgresql: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "BUSY_SECONDS", 0.1)
    with Store(postgresql()) as store, connected(store.url) as other:
        other.execute(text(f"SELECT pg_advisory_xact_lock({engine.WRITING})"))
        assert store.events() == ()
        with pytest.raises(StorageError, match=r"lock timeout; another process locked it"):
            store.record_event("tick", {})
        other.rollback()
        store.record_event("tick", {})


def test_no_password_is_shown_wherever_the_url_has_it() -> None:
    for given, expected in {
        "postgresql+psycopg://me:secret@host/db": "postgresql+psycopg://me:***@host/db",
        "postgresql+psycopg://me@host/db?password=secret&connect_timeout=3": (
            "postgresql+psycopg://me@host/db?password=***&connect_timeout=3"
        ),
    }.items():
        assert without_password(given) == expected
        text = engine.show(engine.parse(given))
        assert "***" in text
        assert "secret" not in text


def test_a_server_that_lets_nobody_in_and_one_that_is_not_there(
    postgresql: Callable[[], str],
) -> None:
    there = postgresql()
    text = message(there.replace("secret", "wrong%40secret"))
    assert "password authentication failed" in text
    assert "give the password in PGPASSWORD" in text
    assert "wrong" not in text
    assert "does not exist; create it (createdb" in message(f"{there}9")
    with socket.socket() as taken:  # bound and not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        text = message(f"postgresql+psycopg://me@127.0.0.1:{taken.getsockname()[1]}/db")
    assert "refused" in text
    assert "check that the server runs" in text


def test_a_store_outlives_its_connections(postgresql: Callable[[], str]) -> None:
    """A server that was restarted has closed them all."""
    with Store(postgresql()) as store:
        store.record_event("tick", {})
        with connected(store.url) as other:
            ours = "datname = current_database() AND pid <> pg_backend_pid()"
            ended = f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE {ours}"
            assert other.scalar(text(ended))
        store.record_event("tick", {})
        assert len(store.events()) == 2


def test_importing_the_package_is_cheap() -> None:
    code = (
        "import sys, autofit.storage; "
        "print(*{'torch', 'optuna', 'sqlalchemy', 'alembic', 'ray'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""
