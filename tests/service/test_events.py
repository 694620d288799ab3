"""Those who follow a search together cost one look at the store each moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from autofit.client import messages
from autofit.service.events import POLL, Events
from autofit.storage import Outcome, Queue, SearchRecord, Store, Submission
from autofit.tuning.notices import Line

pytestmark = pytest.mark.quick

FOLLOWERS = 50
MOMENTS = 4


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
