"""The queue of a service: who is next, what is lost with a process, what each query costs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from autofit.exceptions import UsageError
from autofit.storage import (
    Accounts,
    Limits,
    Outcome,
    Owner,
    Queue,
    SearchRecord,
    SearchState,
    Store,
    StudyRecord,
    Submission,
)
from autofit.storage.queue import MOST_ATTEMPTS, REPLACED, NoSuchSearch
from autofit.tuning.notices import NewOutput

pytestmark = pytest.mark.quick

FIRST = Submission(script=("train.py",), upload="aa", options={"memory": "2GiB"})
SECOND = replace(FIRST, upload="bb")
THIRD = replace(FIRST, upload="cc")


@pytest.fixture
def queue(store: Store) -> Queue:
    return Queue(store)


@pytest.fixture
def gone() -> Owner:
    """A process that has ended."""
    program = "from autofit.storage import Owner; o = Owner.current(); print(o.pid, o.started)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    pid, started = ran.stdout.split()
    return replace(Owner.current(), pid=int(pid), started=float(started))


def claimed(queue: Queue, owner: Owner | None = None) -> SearchRecord:
    """Claim the next search, and say that it has its devices."""
    search = queue.claim(owner or Owner.current(), "runner")
    assert search is not None
    queue.run(search)
    return search


def test_a_submission_is_kept_as_it_was(queue: Queue) -> None:
    search = queue.submit("alice", FIRST)
    assert queue.search(search.id) == search
    assert search.submission == FIRST
    assert search.state is SearchState.QUEUED


def test_the_user_with_the_fewest_searches_is_next(queue: Queue) -> None:
    numbers = [queue.submit("alice", each).id for each in (FIRST, SECOND)]
    last = queue.submit("bob", THIRD).id
    assert [claimed(queue).id for _ in range(3)] == [numbers[0], last, numbers[1]]
    assert queue.claim(Owner.current(), "runner") is None


def test_a_higher_priority_is_next_then_an_earlier_deadline(queue: Queue) -> None:
    later, soon = datetime.now(UTC) + timedelta(hours=2), datetime.now(UTC) + timedelta(hours=1)
    plain = queue.submit("alice", FIRST)
    second = queue.submit("alice", SECOND, deadline=later)
    first = queue.submit("alice", THIRD, deadline=soon)
    urgent = queue.submit("alice", replace(FIRST, upload="dd"), priority=1)
    order = [urgent.id, first.id, second.id, plain.id]
    assert queue.search(plain.id).waits_for == "its turn: 3 others come first"
    assert [claimed(queue).id for _ in order] == order


def test_a_user_holds_no_more_gpus_than_allowed(queue: Queue, store: Store) -> None:
    Accounts(store).limit("alice", Limits(gpus=3))
    first = queue.submit("alice", FIRST, gpus=2)
    second = queue.submit("alice", SECOND, gpus=2)
    other = queue.submit("bob", THIRD, gpus=8)
    assert [claimed(queue).id for _ in range(2)] == [first.id, other.id]
    assert not queue.claimable("a host")
    waits = queue.search(second.id).waits_for
    assert waits == "GPUs of its user, who may hold 3 and holds 2"
    queue.finish(first, None)
    assert claimed(queue).id == second.id


def test_a_search_says_why_it_waits(queue: Queue) -> None:
    first, same = queue.submit("alice", FIRST), queue.submit("bob", FIRST)
    last = queue.submit("bob", SECOND)
    assert queue.search(first.id).waits_for == ""
    starting = queue.claim(Owner.current(), "runner")
    assert starting is not None
    queue.wait(starting, "2 GPUs")
    waits = {each.id: each.waits_for for each in queue.active()}
    assert waits == {
        first.id: "2 GPUs",
        same.id: f"search {first.id}, which searches the same script",
        last.id: f"search {first.id}, which starts before it",
    }


def test_a_search_ends_when_its_deadline_passes_in_the_queue(queue: Queue) -> None:
    now = datetime.now(UTC)
    late = queue.submit("alice", FIRST, deadline=now - timedelta(seconds=1))
    early = queue.submit("alice", SECOND, deadline=now + timedelta(hours=1))
    assert queue.expire() == 1
    found = queue.search(late.id)
    assert found.outcome is not None
    assert found.outcome.message.startswith("its deadline passed while it waited: submit")
    assert queue.search(early.id).state is SearchState.QUEUED
    queue.add_upload("aa", b"archive")
    assert queue.resume(late.id, "alice").deadline is None


def test_the_time_with_gpus_is_the_users(queue: Queue, gone: Owner) -> None:
    queue.submit("alice", FIRST, gpus=2)
    search = claimed(queue, gone)
    time.sleep(0.1)
    queue.reclaim()  # its process is gone
    assert queue.counts().gpu_seconds["alice"] >= 0.2
    again = claimed(queue)
    assert again.id == search.id
    queue.finish(again, None)
    assert 0.2 <= queue.counts().gpu_seconds["alice"] < 5.0


def test_searches_that_share_a_study_run_one_after_the_other(queue: Queue) -> None:
    first, second = queue.submit("alice", FIRST), queue.submit("bob", FIRST)
    assert claimed(queue).id == first.id
    assert not queue.claimable(Owner.current().host)
    queue.finish(first, None)
    assert claimed(queue).id == second.id


def test_one_search_of_a_host_waits_for_devices_at_a_time(queue: Queue) -> None:
    queue.submit("alice", FIRST)
    queue.submit("alice", SECOND)
    waiting = queue.claim(Owner.current(), "runner")
    assert waiting is not None
    queue.wait(waiting, "2 GPUs")
    assert queue.claim(Owner.current(), "other") is None
    assert queue.claimable("another host")
    assert queue.search(waiting.id).waits_for == "2 GPUs"
    queue.run(waiting)
    assert queue.search(waiting.id).waits_for == ""
    assert queue.claimable(Owner.current().host)


def test_a_search_goes_back_to_the_queue_when_its_process_is_gone(
    queue: Queue, gone: Owner
) -> None:
    lost, alive = queue.submit("alice", FIRST), queue.submit("alice", SECOND)
    assert claimed(queue, gone).id == lost.id
    assert claimed(queue).id == alive.id
    assert queue.reclaim() == 1
    assert queue.search(lost.id).state is SearchState.QUEUED
    assert queue.search(alive.id).state is SearchState.RUNNING
    assert queue.reclaim() == 0


def test_a_search_that_is_lost_again_and_again_fails(queue: Queue, gone: Owner) -> None:
    queue.add_upload("aa", b"archive")
    search = queue.submit("alice", FIRST)
    for _ in range(MOST_ATTEMPTS):
        claimed(queue, gone)
        queue.reclaim()
    found = queue.search(search.id)
    assert found.state is SearchState.FAILED
    assert found.outcome is not None
    assert f"lost {MOST_ATTEMPTS} times" in found.outcome.message
    again = queue.resume(search.id, "alice")
    assert (again.state, again.outcome, again.attempts) == (SearchState.QUEUED, None, 0)


def test_cancelling(queue: Queue, gone: Owner) -> None:
    queue.add_upload("bb", b"archive")
    queued, running = queue.submit("alice", FIRST), queue.submit("alice", SECOND)
    assert queue.cancel(queued.id, "alice").state is SearchState.CANCELLED
    claimed(queue, gone)
    assert queue.cancel(running.id, "alice").state is SearchState.RUNNING
    assert queue.search(running.id).cancelled is not None
    queue.reclaim()  # its process ended before it could say so
    assert queue.search(running.id).state is SearchState.CANCELLED
    with pytest.raises(UsageError, match="nothing to cancel"):
        queue.cancel(running.id, "alice")
    assert queue.resume(running.id, "alice").cancelled is None
    with pytest.raises(UsageError, match="was deleted: submit it again"):
        queue.resume(queued.id, "alice")


def test_a_search_is_its_users_alone(queue: Queue) -> None:
    search = queue.submit("alice", FIRST)
    calls: list[Callable[[], Any]] = [
        lambda: queue.search(search.id, "bob"),
        lambda: queue.cancel(search.id, "bob"),
        lambda: queue.resume(search.id, "bob"),
    ]
    for call in calls:
        with pytest.raises(NoSuchSearch):
            call()
    assert queue.searches("bob") == ()
    assert queue.searches("alice") == (search,)


def test_new_output_takes_the_place_of_the_old_output_of_its_slot(queue: Queue) -> None:
    search, other = queue.submit("alice", FIRST), queue.submit("alice", SECOND)
    for each in (search, other):
        queue.tell(each, [(REPLACED, {"slot": slot, "text": "old"}) for slot in (0, 1)])
    seen = queue.notices(search.id)[-1].id
    queue.tell(search, [(REPLACED, {"slot": 1, "text": text}) for text in ("newer", "newest")])
    assert [each.content["text"] for each in queue.notices(search.id)] == ["old", "newest"]
    assert [each.content["text"] for each in queue.notices(search.id, after=seen)] == ["newest"]
    assert [each.content["text"] for each in queue.notices(other.id)] == ["old", "old"]
    assert NewOutput.__name__ == REPLACED


@pytest.mark.parametrize(
    ("part", "found"),
    [("größe", 1), ("TORCHRUN x", 0), ("torchrun", 2), ("%", 1), ("'a\"b", 2), ("zz", 0)],
)
def test_searches_are_found_by_a_part_of_the_script(queue: Queue, part: str, found: int) -> None:
    queue.submit("alice", replace(FIRST, script=("größe%.py",), args=("zz",)))
    queue.submit("alice", replace(FIRST, script=("torchrun", "x 'a\"b.py")))
    assert [each.id for each in queue.searches("alice", script=part)] == ([found] if found else [])


def test_notices_are_taken_up_after_an_id(queue: Queue) -> None:
    search, other = queue.submit("alice", FIRST), queue.submit("alice", SECOND)
    queue.tell(search, [("Line", {"text": "one"}), ("Line", {"text": "two"})])
    queue.tell(other, [("Line", {"text": "of another"})])
    queue.tell(search, [("Line", {"text": "three"})])
    first, *rest = queue.notices(search.id)
    assert [each.content["text"] for each in rest] == ["two", "three"]
    assert list(queue.notices(search.id, after=first.id)) == rest


def test_the_study_of_a_search_can_be_deleted(
    store: Store, queue: Queue, study: StudyRecord
) -> None:
    search = queue.submit("alice", FIRST)
    queue.belongs_to(search, study.id)
    assert queue.search(search.id).study == study.id
    store.delete_study(study)
    assert queue.search(search.id).study is None


def test_uploads_are_deleted_when_no_search_needs_them(queue: Queue) -> None:
    start = datetime.now(UTC)
    for digest in ("aa", "bb", "cc"):
        queue.add_upload(digest, b"archive")
    waits, ended = queue.submit("alice", FIRST), queue.submit("alice", SECOND)
    assert queue.delete_uploads(start) == 0, "all are new"
    queue.finish(ended, None)
    now = datetime.now(UTC)
    assert queue.delete_uploads(queue.search(ended.id).ended or now) == 1, "nobody used cc"
    with pytest.raises(UsageError, match="no longer stored"):
        queue.upload("cc")
    assert queue.delete_uploads(datetime.now(UTC)) == 1
    with pytest.raises(UsageError, match="no longer stored"):
        queue.upload("bb")
    assert queue.upload("aa") == b"archive"
    queue.cancel(waits.id, "alice")
    queue.add_upload("aa", b"archive")
    assert queue.delete_uploads(queue.search(waits.id).ended or now) == 0, "it was sent again"


def test_an_outcome_is_kept(queue: Queue) -> None:
    search = queue.submit("alice", FIRST)
    outcome = Outcome(kind="ScriptError", message="it fails", traceback="Traceback é")
    queue.finish(search, outcome)
    assert queue.search(search.id).outcome == outcome


def test_no_query_scans_a_table(path: Path) -> None:
    """Ask SQLite for the plan of each query of the queue."""
    with Store(f"sqlite:///{path}") as store:
        queue, seen = Queue(store), []

        def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
            seen.append((statement, parameters))

        event.listen(store._reader, "before_cursor_execute", note)
        search = queue.submit("alice", FIRST)
        queue.add_upload("aa", b"archive")
        queue.add_token("alice", "digest")
        calls: list[Callable[[], Any]] = [
            lambda: queue.searches("alice", before=9),
            lambda: queue.active(),
            lambda: queue.counts(),
            lambda: queue.claimable("host"),
            lambda: queue.taken("runner"),
            lambda: queue.claim(Owner.current(), "runner"),
            lambda: queue.reclaim(),
            lambda: queue.expire(),
            lambda: store.heartbeat(Owner.current()),
            lambda: queue.notices(search.id, after=3),
            lambda: queue.tell(search, [("Line", {})]),
            lambda: queue.upload("aa"),
            lambda: queue.delete_uploads(datetime.now(UTC) - timedelta(days=1)),
            lambda: queue.user_of("digest"),
            lambda: queue.cancel(search.id, "alice"),
        ]
        for call in calls:
            call()
        event.remove(store._reader, "before_cursor_execute", note)
        queries = [each for each in seen if each[0].startswith(("SELECT", "UPDATE"))]
        assert len(queries) > len(calls)
        scans = []
        with store.reading() as session:
            for statement, parameters in queries:
                if "UPDATE study" in statement or "UPDATE trial" in statement:
                    continue  # the heartbeat of searches without a service does so too
                cursor = session.connection().exec_driver_sql(
                    f"EXPLAIN QUERY PLAN {statement}", parameters
                )
                scans += [row[3] for row in cursor if row[3].startswith("SCAN")]
        assert set(scans) <= {"SCAN account"}, "a row a user, and the metrics are of all users"
