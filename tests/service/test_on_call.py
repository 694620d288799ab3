"""What whoever is on call has: figures, rules for alerts, tokens that end."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from autofit.cli import main
from autofit.client.http import Service
from autofit.exceptions import UsageError
from autofit.storage import Owner, Queue, Store, Submission
from tests.service.serving import Running

pytestmark = pytest.mark.quick

ALERTS = Path(__file__).parents[2] / "deploy/alerts.yaml"


def figures(text: str) -> dict[str, float]:
    """Return the figures without labels, and with them, by name."""
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_every_figure_of_the_rules_is_in_the_metrics(running: Running) -> None:
    yaml = pytest.importorskip("yaml")
    alice = running.user("alice")
    alice.get("/api/searches")
    known = {re.split(r"[{ ]", line)[0] for line in alice.text("/metrics").splitlines()}
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert len(rules) >= 5
    for rule in rules:
        assert rule["annotations"]["summary"]
        for name in re.findall(r"autofit_\w+", rule["expr"]):
            assert name in known, rule["alert"]


def test_the_figures_of_requests_and_of_the_queue(tmp_path: Path) -> None:
    with Running.start(tmp_path) as running:
        alice = running.user("alice")
        assert figures(alice.text("/metrics"))["autofit_queue_age_seconds"] == 0.0
        running.queue.submit("bob", Submission(script=("t.py",), upload="aa"), gpus=3)
        time.sleep(0.1)
        with pytest.raises(UsageError):
            alice.get("/api/searches/999")
        found = figures(alice.text("/metrics"))
        assert 0.1 <= found["autofit_queue_age_seconds"] < 60
        assert found["autofit_ray_up"] == 1.0
        count = 'autofit_request_seconds_count{method="GET",route="%s",status="%d"}'
        assert found[count % ("/api/searches/{number}", 404)] == 1.0
        assert found[count % ("/metrics", 200)] == 1.0
        search = running.queue.claim(Owner.current(), "runner")
        assert search is not None
        running.queue.run(search)
        assert figures(alice.text("/metrics"))["autofit_gpus_held"] == 3.0


def test_tokens_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Running.start(tmp_path) as running:
        store = ("--storage", running.store.url)
        tokens = []
        for words in (["--expires", "1s"], ["--expires", "2h"], []):
            assert main(["token", "create", "alice", *words, *store]) == 0
            tokens.append(Service(running.url, capsys.readouterr().out.strip()))
        assert main(["token", "create", "alice", "--expires", "99999999999h", *store]) == 2
        time.sleep(1.1)
        with pytest.raises(UsageError, match="no valid token"):
            tokens[0].get("/api/searches")
        assert tokens[1].get("/api/searches") == tokens[2].get("/api/searches") == []
        assert main(["token", "list", *store]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [re.sub(r"20\S+ \S+ UTC", "TIME", line) for line in lines] == [
            "1  alice  made TIME  refused since TIME",
            "2  alice  made TIME  expires TIME",
            "3  alice  made TIME",
        ]
        assert main(["token", "revoke", "alice", "--number", "2", *store]) == 0
        with pytest.raises(UsageError, match="no valid token"):
            tokens[1].get("/api/searches")
        assert tokens[2].get("/api/searches") == []
        assert main(["token", "revoke", "alice", *store]) == 0
        with pytest.raises(UsageError, match="no valid token"):
            tokens[2].get("/api/searches")
        stranger = Service(running.url, "")
        with pytest.raises(UsageError, match="no valid token"):  # it stays closed to all
            stranger.get("/api/searches")
        assert main(["token", "revoke", "alice", *store]) == 2
        assert main(["token", "audit", *store]) == 0
        assert "revoke  alice, number 2" in capsys.readouterr().out


def test_a_long_queue_of_one_user_stalls_nobody(tmp_path: Path) -> None:
    """The reason of each of 2,000 searches is found in one pass."""
    with Running.start(tmp_path) as running:
        bob = running.user("bob")
        _fill(running.queue, 2000)
        began = time.monotonic()
        assert "wait" in bob.text("/")
        page = time.monotonic() - began
        began = time.monotonic()
        assert len(running.queue.active()) == 2001
        every = time.monotonic() - began
        own = running.queue.submit("bob", Submission(script=("b.py",), upload="bb"))
        assert running.queue.claim(Owner.current(), "first") is not None
        assert running.queue.fail_next("another host", "it ends") == own.id, "fair share"
    assert page < 5.0, "it takes some 0.2 s on an idle machine"
    assert every < 10.0


def _fill(queue: Queue, count: int) -> None:
    """Queue searches of one user, in one transaction."""
    from datetime import UTC, datetime

    from autofit.storage.models import SearchRow

    first = queue.submit("alice", Submission(script=("a.py",), upload="aa"))
    with queue._store.writing() as session:
        for number in range(count):
            submission = Submission(script=(f"{number}.py",), upload="aa")
            row = SearchRow(user="alice", state="queued", submission=submission)
            row.subject, row.gpus, row.priority = submission.subject, 1, 0
            row.attempts, row.created = 0, datetime.now(UTC)
            session.add(row)
    assert first.id == 1


def test_stop_needs_no_store(capsys: pytest.CaptureFixture[str]) -> None:
    url = "postgresql+psycopg://nobody@127.0.0.1:1/none"
    assert main(["serve", "--stop", "--storage", url]) == 0
    assert capsys.readouterr().out == "nothing runs\n"


def test_a_search_that_never_begins_fails_with_a_reason(tmp_path: Path) -> None:
    with Store(str(tmp_path / "service.db")) as store:
        queue = Queue(store)
        number = queue.submit("alice", Submission(script=("t.py",), upload="aa")).id
        assert queue.fail_next("a host", "its process ends before it begins") == number
        found = queue.search(number)
        assert found.outcome is not None
        assert (found.state, found.outcome.message) == (
            "failed",
            "its process ends before it begins",
        )
        assert queue.fail_next("a host", "none is left") is None


def test_the_gpus_of_a_launch_line_count(tmp_path: Path) -> None:
    from autofit.storage import Accounts, Limits

    with Store(str(tmp_path / "service.db")) as store:
        queue = Queue(store)
        Accounts(store).limit("alice", Limits(gpus=4))
        for name in ("a.py", "b.py"):
            queue.submit("alice", Submission(script=(name,), upload="aa"))
        first = queue.claim(Owner.current(), "one")
        second = queue.claim(Owner.current(), "two") if first is None else None
        assert first is not None
        assert queue.needs(first, 3)
        queue.run(first)
        second = queue.claim(Owner.current(), "two")
        assert second is not None
        assert not queue.needs(second, 2), "alice would hold five"
        assert queue.search(second.id).waits_for.startswith("GPUs of its user")
        queue.finish(first, None)
        second = queue.claim(Owner.current(), "three")
        assert second is not None
        assert queue.needs(second, 2)
        with pytest.raises(UsageError, match="needs 8 GPUs, and alice may hold 4"):
            queue.needs(second, 8)
