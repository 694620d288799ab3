"""The records of the searches that a service runs. Imports no SQLAlchemy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from autofit.storage.owner import Owner


class SearchState(StrEnum):
    """State of a search of the service."""

    QUEUED = "queued"
    STARTING = "starting"
    """It waits until Ray has reserved its devices."""
    RUNNING = "running"
    FINISHED = "finished"
    """It has a best plan."""
    FAILED = "failed"
    """It ended with an error: see ``Outcome``. It may be queued again."""
    CANCELLED = "cancelled"
    """A user ended it. It may be queued again."""

    @property
    def ended(self) -> bool:
        """Whether the search only goes on if a user queues it again."""
        return self in ENDED


ACTIVE = (SearchState.STARTING, SearchState.RUNNING)
"""States in which an actor owns the search."""
ENDED = (SearchState.FINISHED, SearchState.FAILED, SearchState.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """The script and the options of a search, as for ``autofit.search``."""

    script: tuple[str, ...]
    """The path of the script below its folder, the name of a module, or a launch line."""
    args: tuple[str, ...] = ()
    """Arguments of the script."""
    module: bool = False
    folder: str | None = None
    """The working directory, on storage that the machines of the service share."""
    upload: str | None = None
    """The digest of an uploaded working directory; given if ``folder`` is not."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``autofit search`` by name, with values as people write them."""

    @property
    def subject(self) -> str:
        """SHA-256 of what the studies of two searches have in common, hexadecimal.

        Searches with equal subjects may share a study, so they run one after the other.
        """
        words = (self.folder, self.upload, self.script, self.module, self.args)
        shared = [*words, self.options.get("memory"), self.options.get("allow")]
        return hashlib.sha256(json.dumps(shared).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The error with which a search ended."""

    kind: str
    """The name of the error's class, such as ``"NothingFits"``."""
    message: str
    traceback: str = ""
    """The traceback of the script, if the script failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """A search of the service at the moment when it was read."""

    id: int
    user: str
    state: SearchState
    submission: Submission
    study: str | None
    """``StudyRecord.id``; ``None`` before the study is open."""
    waits_for: str
    """What a queued or starting search waits for; otherwise empty."""
    priority: int
    """Searches with a higher priority start first."""
    deadline: datetime | None
    """When it has to have ended, in UTC; ``None`` if any time will do."""
    gpus: int
    """GPUs that it needs; 1 also on the CPU."""
    cancelled: datetime | None
    """When a user asked to end the search; ``None`` if nobody did."""
    attempts: int
    """How often an actor took it up since it was queued by a user."""
    outcome: Outcome | None
    """The error of a failed search."""
    owner: Owner | None
    """The process that runs it, or ran it last."""
    created: datetime
    """In UTC."""
    started: datetime | None
    ended: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a user of the service may have."""

    gpus: int | None = None
    """GPUs that the user's searches may hold at a time; ``None`` for any number."""
    priority: int = 0
    """The highest priority of the user's searches."""
    queued: int = 200
    """Searches of the user that may wait at a time."""
    upload_bytes: int = 2 << 30
    """Bytes of the user's uploaded folders that are kept at a time, compressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """A token of a user; the token itself is not stored."""

    id: int
    user: str
    created: datetime
    """In UTC."""
    expires: datetime | None
    """From when on it is refused, in UTC; ``None`` for never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """One thing that somebody did, or tried to do."""

    id: int
    user: str
    """Empty if the service did not know who it was."""
    action: str
    """A word, such as ``"submit"``."""
    target: str
    """What it was done to, such as ``"search 7"``."""
    address: str
    """The network address of the client; empty for a command on the service's machine."""
    created: datetime
    """In UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a store holds, by kind."""

    searches: Mapping[str, int]
    """Searches of the service by state."""
    trials: Mapping[str, int]
    """Finished trials by verdict."""
    out_of_memory: Mapping[str, int]
    """Trials that ran out of memory, by the phase in which they did."""
    gpu_seconds: Mapping[str, float]
    """Seconds for which ended searches held GPUs, times the GPUs, by user."""
    oldest: datetime | None
    """When the search was submitted that has waited longest; ``None`` if none waits."""
    held: int
    """GPUs that running searches hold; on the CPU, 1 stands for a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeRecord:
    """A notice of a search: one line of its progress."""

    id: int
    """Grows within a search."""
    kind: str
    """The name of the notice's class, such as ``"TrialEnded"``."""
    content: Mapping[str, Any]
    """Plain JSON."""
