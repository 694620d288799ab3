"""Uploaded folders and scripts of users, read with the users' rights, a few at a time."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from autofit.analysis.result import Result
from autofit.export import render
from autofit.service import confined
from autofit.service.runner import name_of_upload
from autofit.service.users import Users
from autofit.storage import Queue, SearchRecord

MOST = 2
"""Files of users that are read at a time; an uploaded folder may be in memory once."""
READS_THE_SCRIPT = "patch"
"""The export format that changes the script's own text."""


class Files:
    """The files that users sent, or that their searches name."""

    def __init__(self, queue: Queue, users: Users, limit: int) -> None:
        """``limit``: bytes of an uploaded folder."""
        self._queue = queue
        self._users = users
        self._limit = limit
        self._reading = asyncio.Semaphore(MOST)
        self._own: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @contextlib.asynccontextmanager
    async def turn(self, user: str) -> AsyncIterator[None]:
        """Wait until a file of this user may be read, one at a time; who waits holds no thread."""
        async with self._own[user], self._reading:
            yield

    def store(self, file: IO[bytes], user: str, address: str) -> str:
        """Store an archive in this turn of its user; return its name.

        ``address``: the client's, for the audit trail.
        """
        file.seek(0)
        digest = confined.digest(file, self._limit, self._users.uid(user))
        file.seek(0)
        limits = self._users.limits(user)
        self._queue.add_upload(digest, file.read(), user, limits=limits, address=address)
        return digest

    def render(self, form: str, search: SearchRecord, result: Result, partial: bool) -> str:
        """Return the result of a search in a format; ``READS_THE_SCRIPT`` needs the user's turn."""
        if (digest := search.submission.upload) is not None:
            script = replace(result.script, cwd=name_of_upload(digest))
            result = replace(result, script=script)
        if form != READS_THE_SCRIPT:
            return render(form, result, partial=partial)
        uid = self._users.uid(search.user)
        if digest is None:
            return confined.render(form, result, partial, uid)
        with tempfile.TemporaryDirectory(prefix="autofit-") as scratch:
            folder = Path(scratch, "files")
            confined.unpack(self._queue.upload(digest), folder, self._limit, uid)
            result = replace(result, script=replace(result.script, cwd=str(folder)))
            return confined.render(form, result, partial, uid)
