"""No read of the service scans a table that grows: SQLite's plan of each query says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from autofit.client import messages
from autofit.storage import Owner, Store, Submission
from autofit.tuning.notices import Line
from tests.report.stored import BF16, FACTS, LEAN, add, figures, measured, opened
from tests.service.serving import Running

pytestmark = pytest.mark.quick

OF_USERS = {"account", "token"}
"""Tables with a few rows for each user. They may be scanned."""


@contextmanager
def queries(store: Store) -> Iterator[list[tuple[str, Any]]]:
    """Yield the list of the queries that are sent to the store inside this context."""
    seen: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith(("SELECT", "WITH")):
            seen.append((statement, parameters))

    event.listen(store._reader, "before_cursor_execute", note)
    yield seen
    event.remove(store._reader, "before_cursor_execute", note)


def scanned(store: Store, seen: list[tuple[str, Any]]) -> dict[str, str]:
    """Return the tables that are scanned, each with a query that does so."""
    found = {}
    with store.reading() as session:
        for statement, parameters in seen:
            plan = session.connection().exec_driver_sql(
                f"EXPLAIN QUERY PLAN {statement}", parameters
            )
            for row in plan:
                if scan := re.match(r"SCAN (?:TABLE )?(\w+)", row[3]):
                    found[_table(scan[1], statement)] = statement
    return found


def _table(alias: str, statement: str) -> str:
    """Return the table that a query calls ``alias``."""
    named = re.search(rf"\b(\w+) AS {re.escape(alias)}\b", statement)
    return named[1] if named else alias


def test_a_scan_is_seen(tmp_path: Path) -> None:
    with Store(str(tmp_path / "service.db")) as store:
        assert set(scanned(store, [("SELECT * FROM trial", ())])) == {"trial"}
        aliased = "SELECT * FROM trial AS t WHERE t.launch = 1"
        assert set(scanned(store, [(aliased, ())])) == {"trial"}
        assert scanned(store, [("SELECT * FROM trial WHERE id = 3", ())]) == {}


def test_no_read_scans_a_table_that_grows(tmp_path: Path) -> None:
    with Running.start(tmp_path) as running:
        alice = running.user("alice")
        (user,) = running.queue.users()
        done = running.queue.submit(user, Submission(script=("t.py",), upload="aa"))
        study = opened(running.store)
        running.store.set_facts(study, FACTS)
        for report in (measured(LEAN, figures(10.0, 8.0)), measured(BF16, figures(20.0, 12.0))):
            add(running.store, study, report)
        running.queue.belongs_to(done, study.id)
        running.queue.tell(done, [messages.notice_to_json(Line(text="a line"))])
        running.queue.finish(done, None)
        for number in range(3):  # one runs, two wait
            running.queue.submit(user, Submission(script=("t.py",), upload=f"b{number % 2}"))
        assert running.queue.claim(Owner.current(), "runner") is not None
        document = alice.get("/openapi.json")
        reads = [path for path, methods in document["paths"].items() if "get" in methods]
        assert len(reads) >= 9, reads
        scans = {}
        for path in (*reads, "/", "/searches/{number}"):
            with queries(running.store) as seen:
                alice.text(path.replace("{number}", str(done.id)))
            assert seen or path == "/healthz", path
            for table, statement in scanned(running.store, seen).items():
                if table not in OF_USERS:
                    scans[path, table] = statement
        assert scans == {}
