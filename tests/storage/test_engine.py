"""Opening the store: migrations, Optuna in the same file, many processes, clear errors."""

import logging
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from autofit.exceptions import StorageError
from autofit.plan import Plan
from autofit.storage import Owner, Store, StudyRecord, default_url, engine, models
from autofit.worker.records import TrialReport

pytestmark = pytest.mark.quick

Open = Callable[..., StudyRecord]
Report = Callable[..., TrialReport]
OURS = {"study", "trial", "measurement", "event", "fitted", engine.VERSION_TABLE}


def tables(path: Path) -> set[str]:
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {name for (name,) in rows}


# --- migrations -------------------------------------------------------------------------------


def test_an_empty_store_is_migrated_to_the_newest_revision(store: Store, path: Path) -> None:
    config = Config()
    config.set_main_option("script_location", engine.migrations_folder())
    assert ScriptDirectory.from_config(config).get_current_head() == engine.HEAD
    assert tables(path) == OURS


def test_a_store_of_an_older_version_keeps_what_it_holds(
    store: Store, path: Path, study: StudyRecord, plan: Plan, report: Report
) -> None:
    (trial,) = store.add_trials(study, [plan], launch=0, owner=Owner.current())
    kept = store.finish(trial, report(plan))
    store.close()
    config = Config()
    config.set_main_option("script_location", engine.migrations_folder())
    opened = engine.open_engine(engine.parse(str(path)))
    with opened.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
        assert engine.revision(connection) == "0001"
    opened.dispose()
    with Store(str(path)) as again:
        assert again.trials(study) == (kept,)
        assert again.reference(study) is None


def test_the_migrations_make_what_the_models_say(store: Store) -> None:
    opened = engine.open_engine(engine.parse(store.url))
    with opened.connect() as connection:
        options = {
            "version_table": engine.VERSION_TABLE,
            "compare_server_default": True,
            "include_name": lambda name, kind, _: kind != "table" or name in OURS,
        }
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, models.Base.metadata) == []
    opened.dispose()


def test_a_store_of_a_newer_version_is_refused_untouched(store: Store, path: Path) -> None:
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE {engine.VERSION_TABLE} SET version_num = '9999'")
    with pytest.raises(StorageError, match="newer version of autofit; upgrade autofit"):
        Store(str(path))


def test_a_migration_that_fails_leaves_nothing(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE measurement (theirs INTEGER)")
    with pytest.raises(StorageError, match="table measurement already exists"):
        Store(str(path))
    assert tables(path) == {"measurement"}


def test_sqlite_is_set_up(store: Store) -> None:
    opened = engine.open_engine(engine.parse(store.url))
    with opened.connect() as connection:
        pragma = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys", "busy_timeout")
        }
    opened.dispose()
    assert pragma == {"journal_mode": "wal", "foreign_keys": 1, "busy_timeout": 30_000}


# --- Optuna in the same file ------------------------------------------------------------------


def use_optuna(url: str, study: str) -> None:
    import optuna

    optuna.logging.set_verbosity(logging.ERROR)
    made = optuna.create_study(storage=optuna.storages.RDBStorage(url), study_name=study)
    trial = made.ask()
    trial.suggest_categorical("precision", ["as_is", "bf16"])
    made.tell(trial, 1.0)


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_optuna_lives_in_the_same_file(
    path: Path, first: str, opening: Open, plan: Plan, report: Report
) -> None:
    url = f"sqlite:///{path}"
    if first == "theirs":
        use_optuna(url, "before")
    with Store(url) as store:
        study = opening(store)
        use_optuna(store.url, "between")
        (trial,) = store.add_trials(study, [plan], launch=0, owner=Owner.current())
        store.finish(trial, report(plan), optuna_number=0)
    use_optuna(url, "after")
    with Store(url) as again:
        assert again.trials(study)[0].report == report(plan)
    assert {"alembic_version", "trials", *OURS} <= tables(path)


# --- many at once -----------------------------------------------------------------------------

OPEN_AND_COUNT = """
import sys
from autofit.storage import Store
sys.stdin.readline()
with Store(sys.argv[1]) as store:
    for number in range(20):
        store.record_event("tick", {"number": number})
"""


def test_processes_that_open_a_new_store_at_once_all_get_it(path: Path) -> None:
    command = [sys.executable, "-c", OPEN_AND_COUNT, str(path)]
    ran = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(4)]
    for process in ran:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
    assert [process.wait(timeout=60) for process in ran] == [0] * 4
    with Store(str(path)) as store:
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


def message(storage: str) -> str:
    with pytest.raises(StorageError) as caught:
        Store(storage)
    text = str(caught.value)
    assert "\n" not in text
    assert "sqlalche.me" not in text
    return text


def test_a_file_that_is_no_database(path: Path) -> None:
    path.write_text("notes\n" * 1000)
    assert "file is not a database; it is some other file: move it" in message(str(path))
    assert path.read_text() == "notes\n" * 1000


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    text = message(str(tmp_path / "gone" / "autofit.db"))
    assert f"there is no directory {tmp_path}/gone: make it" in text


def test_a_directory_that_cannot_be_written() -> None:
    """Nobody makes files in /proc, root included."""
    assert "/proc/autofit.db" in message("/proc/autofit.db")
    assert "its directory must be writable" in message("/proc/autofit.db")


@pytest.mark.parametrize("storage", ["://", "sqlite//:x://", "", "what?.db"])
def test_what_is_no_url(storage: str) -> None:
    assert f"the store cannot be at {storage!r}" in message(storage)


def test_a_database_nobody_knows_and_a_driver_that_is_not_installed() -> None:
    assert "no database driver for 'banana' is installed" in message("banana://host/db")
    text = message("mysql+oursql://me:secret@host/db")
    assert "no database driver" in text
    assert "secret" not in text


def test_a_store_kept_locked_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BUSY_SECONDS", 0.1)
    with Store(str(path)) as store, sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        assert store.events() == ()
        with pytest.raises(StorageError, match=r"database is locked; another process kept it"):
            store.record_event("tick", {})
        other.execute("ROLLBACK")
        store.record_event("tick", {})


def test_importing_the_package_is_cheap() -> None:
    code = (
        "import sys, autofit.storage; "
        "print(*{'torch', 'optuna', 'sqlalchemy', 'alembic', 'ray'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""
