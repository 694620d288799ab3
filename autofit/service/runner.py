"""The actor that runs one search of the queue, and ends with it."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from autofit.client import messages
from autofit.exceptions import AutofitError, StorageError, StoreUnavailable, UsageError
from autofit.service import confined, requests
from autofit.service.users import Users
from autofit.storage import Outcome, Owner, Queue, SearchRecord, Store
from autofit.storage.queue import missed
from autofit.storage.records import ORIGIN
from autofit.tuning.controller import search as search_plans
from autofit.tuning.notices import Notice, StudyStarted, TrialEnded
from autofit.tuning.options import SearchOptions
from autofit.worker.cluster.reservation import Reservation, reserve
from autofit.worker.launch.other_uid import allowed
from autofit.worker.launch.reaper import Reaper

NAMESPACE = "autofit"
"""Ray's namespace of the service's actors."""
WATCH = 0.5
"""Seconds between two looks at the search's row, for a cancellation."""
HEARTBEAT = 10.0
"""Seconds between two heartbeats of a search."""
GOODBYE = 20.0
"""Seconds that a cancelled search has to end before its process is ended."""
FLUSH = 0.2
"""Seconds for which notices are collected."""
_FOLDER = "files"


class SearchRunner:
    """The actor. It is detached: it goes on when the service ends.

    It works while Ray creates it, because a method would have to be called by the service, which
    may end before Ray has created the actor.
    """

    def __init__(self, storage: str, address: str, runner: str, limit: int, apart: bool) -> None:
        """Claim the next search of the queue, run it, and end this process.

        ``limit``: bytes of an uploaded folder; ``runner``: a name for this actor in the store;
        ``apart``: run scripts under a uid of their user.
        """
        import ray

        # `ray start` in a background process ignores SIGINT, and workers inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with Store(storage) as store:
            queue = Queue(store)
            search = queue.claim(Owner.current(), runner)
            if search is not None:
                uid = Users(store, trusted=not apart).uid(search.user)
                with _Watch(store, queue, search) as watch:
                    _run(store, queue, search, watch, address, limit, uid)
        leave: Any = ray.actor.exit_actor  # it has no types
        leave()


def _run(
    store: Store,
    queue: Queue,
    search: SearchRecord,
    watch: _Watch,
    address: str,
    limit: int,
    uid: int | None,
) -> None:
    """Run a claimed search and store how it ended."""
    outcome: Outcome | None = None
    try:
        with _folder(queue, search, limit, uid) as folder, _Recorder(queue, search) as recorder:
            searched = _search(store, queue, search, recorder, folder, address, uid)
        watch.end()
    except KeyboardInterrupt:
        watch.end()
        queue.stop(search)
        return
    except StoreUnavailable:  # the search is queued again, as after a kill
        watch.end()
        raise
    except AutofitError as error:
        watch.end()
        outcome = messages.outcome_of(error)
    except Exception as error:
        watch.end()
        queue.finish(search, messages.outcome_of(error))
        raise
    if outcome is not None or searched:
        queue.finish(search, outcome)


def _search(
    store: Store,
    queue: Queue,
    search: SearchRecord,
    recorder: _Recorder,
    folder: Path,
    address: str,
    uid: int | None,
) -> bool:
    """Search; return ``False`` if the search waits in the queue again, for more GPUs."""
    found = confined.understand(search.submission, folder, uid)
    options = requests.search_options(search.submission, found, storage=store.url, address=address)
    gpus = requests.needed(options.gpus, options.gpus_per_trial)
    if gpus != search.gpus and not queue.needs(search, gpus):
        return False
    reserved = reserve(options.gpus, options.gpus_per_trial or 1, allowed(os.environ), uid=uid)
    queue.wait(search, reserved.name)
    _await(reserved, search)
    options = _within_deadline(options, search)
    queue.run(search)
    if search.submission.upload is not None:
        os.environ[ORIGIN] = name_of_upload(search.submission.upload)
    search_plans(options, recorder, reserved=reserved)
    return True


def name_of_upload(digest: str) -> str:
    """Return the name of an uploaded folder, in place of its path, by which studies know it."""
    return f"upload:{digest[:16]}"


def _await(reserved: Reservation, search: SearchRecord) -> None:
    """Wait for the devices; raise ``UsageError`` when the search's deadline comes first."""
    while not reserved.ready(1.0):
        if search.deadline is not None and datetime.now(UTC) >= search.deadline:
            raise UsageError(missed(reserved.name))


def _within_deadline(options: SearchOptions, search: SearchRecord) -> SearchOptions:
    """Return options with which the search ends at its deadline."""
    if search.deadline is None:
        return options
    left = max(1.0, (search.deadline - datetime.now(UTC)).total_seconds())
    return replace(options, timeout=min(left, options.timeout or left))


@contextlib.contextmanager
def _folder(queue: Queue, search: SearchRecord, limit: int, uid: int | None) -> Iterator[Path]:
    """Yield the working directory of the script; remove an unpacked one, also after a kill.

    An unpacked folder belongs to ``uid``, and is closed to others.
    """
    if search.submission.folder is not None:
        yield Path(search.submission.folder)
        return
    assert search.submission.upload is not None, "`check` has required one of both"
    session = uuid.uuid4().hex
    scratch = Path(tempfile.gettempdir(), f"autofit-{session[:16]}")
    reaper = Reaper(session, scratch, aside=True)
    try:
        folder = scratch / _FOLDER
        confined.unpack(queue.upload(search.submission.upload), folder, limit, uid)
        yield folder
    finally:
        reaper.finish()


class _Watch:
    """A thread that keeps the search's lease, and interrupts the main thread on a cancellation."""

    def __init__(self, store: Store, queue: Queue, search: SearchRecord) -> None:
        self._store = store
        self._queue = queue
        self._search = search
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()
        self._thread.join()

    def end(self) -> None:
        """Interrupt the main thread no more."""
        with self._lock:
            self._over.set()

    def _watch(self) -> None:
        owner, beats = Owner.current(), 0.0
        while not self._over.wait(WATCH):
            beats += WATCH
            with contextlib.suppress(StorageError):  # the next round tries again
                if beats >= HEARTBEAT:
                    beats = 0.0
                    self._store.heartbeat(owner)
                if self._queue.search(self._search.id).cancelled is not None:
                    break
        with self._lock:
            if self._over.is_set():
                return
            _thread.interrupt_main()
        if not self._over.wait(GOODBYE):
            os._exit(1)  # Ray ends the actors of this one; the service sees that it is gone


class _Recorder:
    """A listener that stores the notices of a search, a few times a second."""

    def __init__(self, queue: Queue, search: SearchRecord) -> None:
        self._queue = queue
        self._search = search
        self._notices: list[tuple[str, dict[str, Any]]] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._flush, name="notices", daemon=True)

    def __call__(self, notice: Notice) -> None:
        if isinstance(notice, StudyStarted):
            self._queue.belongs_to(self._search, notice.study)
        if isinstance(notice, TrialEnded):
            self._queue.progress(self._search)
        with self._lock:
            self._notices.append(messages.notice_to_json(notice))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        self._store()

    def _flush(self) -> None:
        while not self._over.wait(FLUSH):
            with contextlib.suppress(StorageError):  # the next round tries again
                self._store()

    def _store(self) -> None:
        with self._lock:
            found = list(self._notices)
        if found:
            self._queue.tell(self._search, found)
            with self._lock:
                del self._notices[: len(found)]
