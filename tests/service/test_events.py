"""Those who follow a search together cost one look at the store each moment."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autofit.client import messages
from autofit.service.events import POLL, Events
from autofit.storage import Outcome, Queue, SearchRecord, Store, Submission
from autofit.tuning.notices import Line
from tests.postgresql import server
from tests.service.serving import Running

FOLLOWERS = 50
MOMENTS = 4


@pytest.mark.quick
def test_many_who_follow_a_search_share_the_reads(tmp_path: Path) -> None:
    looks = 0

    class Counted(Queue):
        def search(self, number: int, user: str | None = None) -> SearchRecord:
            nonlocal looks
            looks += 1
            return super().search(number, user)

    async def follow(events: Events, number: int) -> list[str]:
        return [text async for text in events.stream(number, 0)]

    async def all_of_them(queue: Queue, search: SearchRecord) -> list[list[str]]:
        events = Events(queue, lambda record: str(record.state))
        following = [asyncio.create_task(follow(events, search.id)) for _ in range(FOLLOWERS)]
        for number in range(MOMENTS):
            await asyncio.sleep(POLL)
            queue.tell(search, [messages.notice_to_json(Line(text=str(number)))])
        queue.finish(search, Outcome(kind="UsageError", message="it ends"))
        return await asyncio.gather(*following)

    with Store(str(tmp_path / "service.db")) as store:
        queue = Counted(store)
        search = queue.submit("alice", Submission(script=("t.py",), upload="aa"))
        told = asyncio.run(all_of_them(queue, search))
    for each in told:
        text = "".join(each)
        assert [f'"text": "{number}"' in text for number in range(MOMENTS)] == [True] * MOMENTS
        assert text.endswith('event: end\ndata: "failed"\n\n')
        assert text.count("event: Line") == MOMENTS
    assert looks < FOLLOWERS, "each of them would look some six times"


@pytest.mark.full
def test_events_and_requests_survive_restarts_of_postgresql(tmp_path: Path) -> None:
    """A client that follows a search sees each notice once, and a search exists once."""
    pauses = (0.0, 1.0, 3.0)
    with server() as postgresql, Running.start(tmp_path, storage=postgresql()) as running:
        alice = running.user("alice")
        (user,) = running.queue.users()
        search = running.queue.submit(user, Submission(script=("t.py",), upload="aa"))
        running.queue.add_upload("bb", b"archive")
        seen: list[str] = []

        def follow() -> None:
            for event in alice.events(f"/api/searches/{search.id}/events"):
                if event.kind == "Line":
                    seen.append(event.content["text"])

        with ThreadPoolExecutor(2) as pool:
            following = pool.submit(follow)
            for number, pause in enumerate(pauses):
                running.queue.tell(search, [messages.notice_to_json(Line(text=str(number)))])
                sent = {"script": "t.py", "upload": "bb", "key": f"key{number}"}
                submitted = pool.submit(alice.post, "/api/searches", sent)
                postgresql.restart(pause)
                submitted.result()
            running.queue.finish(search, None)
            following.result()
        assert seen == [str(number) for number in range(len(pauses))]
        assert len(alice.get("/api/searches")) == 1 + len(pauses)
