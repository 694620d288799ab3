"""Server-sent events of a search; all who follow it share the reads of the store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool

from autofit.storage import Queue, SearchRecord

POLL = 0.3
"""Seconds between two looks for new notices."""
SIGN_OF_LIFE = 15.0
"""Seconds after which a stream without events sends a comment."""

_Look = tuple[SearchRecord, str, int]
"""A search, the text of its new events, and the id of the last one."""


class Events:
    """Streams of the events of searches."""

    def __init__(self, queue: Queue, answer: Callable[[SearchRecord], Any]) -> None:
        """``answer`` returns what a change of the state, and the end, says of a search."""
        self._queue = queue
        self._answer = answer
        self._looks: dict[tuple[int, int], asyncio.Task[_Look]] = {}

    async def stream(self, number: int, last: int) -> AsyncIterator[str]:
        """Yield the events of a search after the one with the id ``last``, until it ends."""
        state, quiet = "", 0.0
        while True:
            record, text, last = await self._shared_look(number, last)
            if text:
                yield text
            elif record.state.ended:
                yield _event("end", self._answer(record))
                return
            now = f"{record.state} {record.waits_for}"
            if now != state and not record.state.ended:
                state = now
                yield _event("state", self._answer(record))
            quiet = 0.0 if text else quiet + POLL
            if quiet >= SIGN_OF_LIFE:
                quiet = 0.0
                yield ": the search goes on\n\n"
            await asyncio.sleep(POLL - asyncio.get_running_loop().time() % POLL)  # all at once

    async def _shared_look(self, number: int, last: int) -> _Look:
        """Look for events; who asks the same while the store is read gets the same answer."""
        key = number, last
        if (look := self._looks.get(key)) is None:
            look = asyncio.create_task(run_in_threadpool(self._look, number, last))
            look.add_done_callback(lambda _: self._looks.pop(key))
            self._looks[key] = look
        return await asyncio.shield(look)

    def _look(self, number: int, last: int) -> _Look:
        record = self._queue.search(number)  # first: later notices come next
        found = self._queue.notices(number, after=last)
        text = "".join(_event(each.kind, each.content, each.id) for each in found)
        return record, text, found[-1].id if found else last


def _event(kind: str, content: Any, number: int | None = None) -> str:
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {kind}\ndata: {json.dumps(content, default=str)}\n\n"
