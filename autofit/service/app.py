"""The HTTP interface of the service. Its OpenAPI document is at ``/openapi.json``."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, Any

from fastapi import FastAPI, Header, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    StreamingResponse,
)
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from autofit._version import __version__
from autofit.analysis.ranking import result_of
from autofit.client import archive, messages
from autofit.client.search import OF_THE_SERVICE
from autofit.exceptions import AutofitError, StorageError, UsageError
from autofit.export import FORMATS
from autofit.report.content import read
from autofit.report.page import page
from autofit.service import refusals, requests
from autofit.service.boundary import CONNECTIONS, Boundary, User, address_of
from autofit.service.events import Events
from autofit.service.files import READS_THE_SCRIPT, Files
from autofit.service.gpus import Gpus, GpusAnswer
from autofit.service.metrics import KIND, ServiceFigures
from autofit.service.observed import Observed
from autofit.service.pages import add_pages
from autofit.service.users import Users
from autofit.storage import Outcome, Queue, SearchRecord, Store, StudyRecord, Submission
from autofit.storage.convert import to_json
from autofit.tuning.options import flags
from autofit.worker.cluster.nodes import ClusterNode

MOST = 100
"""Searches in one answer of the list."""
_OPTIONS = "; ".join(
    f"`{each.name}`: {flag.help}" for each, flag in flags() if each.name not in OF_THE_SERVICE
)


_SURE = 1.0
"""Seconds for which an answer about the store counts."""
LARGEST = 2**31 - 1
"""The largest number of a row that every database takes."""


def _readable(text: str) -> str:
    """Return ``text``; raise ``ValueError`` for what UTF-8 cannot hold, or a database."""
    text.encode()
    if "\0" in text:
        raise ValueError("it contains NUL")
    return text


Word = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_readable)]
"""A path, an argument, or the value of an option."""
Words = Annotated[list[Word], Field(max_length=1000)]
Value = bool | Annotated[int, Field(ge=-(2**53), le=2**53)] | float | Word | Words | None
"""The value of an option, as people write it."""
Number = Annotated[int, Path(ge=1, le=LARGEST)]
"""The number of a search."""
Before = Annotated[int, Query(ge=1, le=LARGEST)] | None


class SearchRequest(BaseModel):
    """A script, its folder and the options of the search."""

    model_config = ConfigDict(extra="forbid")

    script: Word | Words = Field(
        description="The path of the script below its folder, the name of a module, or the words"
        " of a launch line."
    )
    args: Words = Field(default=[], description="Arguments of the script.")
    module: bool = Field(default=False, description="Whether `script` is the name of a module.")
    upload: Annotated[str, Field(pattern="^[0-9a-f]{1,64}$")] | None = Field(
        default=None, description="The folder, as `/api/uploads` named it."
    )
    folder: Word | None = Field(
        default=None, description="The folder on storage that the service shares."
    )
    options: Annotated[dict[Word, Value], Field(max_length=100)] = Field(
        default={}, description=_OPTIONS
    )
    priority: int = Field(
        default=0,
        ge=-requests.MOST_PRIORITY,
        le=requests.MOST_PRIORITY,
        description="Searches with a higher priority start first.",
    )
    key: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")] | None = Field(
        default=None,
        description="A name of your own for this request. If it is sent again, the search that"
        " exists already is the answer.",
    )
    deadline: Annotated[str, StringConstraints(max_length=40)] | None = Field(
        default=None,
        description="The time, from now, in which the search has to end, such as `2h`. A running"
        " search ends with the best plan so far, a waiting one fails.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchAnswer:
    """A search of the service."""

    id: int
    user: str
    state: str
    """queued, starting, running, finished, failed or cancelled."""
    script: str
    options: dict[str, Any]
    waits_for: str
    """What a search that is queued or starts waits for; otherwise empty."""
    gpus: int
    """GPUs that it needs; 1 also on the CPU."""
    priority: int
    deadline: datetime | None
    study: str | None
    error: Outcome | None
    """The error of a failed search."""
    created: datetime
    started: datetime | None
    ended: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadAnswer:
    """A stored folder."""

    upload: str
    """Its name for `upload` in the request of a search."""


def make_app(
    store: Store,
    users: Users,
    *,
    limit: int = archive.LIMIT,
    connections: int = CONNECTIONS,
    alive: Callable[[], bool] = lambda: True,
    machines: Callable[[], Iterable[ClusterNode]] = tuple,
) -> FastAPI:
    """Return the application on a store.

    ``limit``: bytes of an uploaded folder; ``connections``: of all clients; ``alive``: whether
    searches can be started; ``machines``: those of the Ray cluster.
    """
    app = FastAPI(
        title="autofit",
        version=__version__,
        description="Finds the fastest way to run the same PyTorch training inside a memory budget",
        docs_url=None,  # these pages load scripts from other servers
        redoc_url=None,
    )
    app.add_exception_handler(AutofitError, refusals.of_error)
    app.add_exception_handler(RequestValidationError, refusals.of_request)
    app.add_exception_handler(HTTPException, refusals.of_path)
    queue = Queue(store)
    held = Gpus(queue, machines)
    figures = ServiceFigures(store, held, alive)
    app.add_middleware(Boundary, users=users, limit=limit, connections=connections)
    app.add_middleware(Observed, seen=figures.seen)
    app.state.users = users
    files = Files(queue, users, limit)
    _add_searches(app, queue, users, files)
    _add_results(app, store, queue, files)
    _add_probes(app, queue, alive)

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics(user: User) -> PlainTextResponse:
        """Return figures for Prometheus, of all users together."""
        return PlainTextResponse(figures.text(), media_type=KIND)

    @app.get("/api/gpus")
    def gpus(user: User) -> GpusAnswer:
        """Return the machines with GPUs, and who holds how many."""
        return held.look()

    add_pages(app, store, queue, held)
    return app


def _add_searches(app: FastAPI, queue: Queue, users: Users, files: Files) -> None:
    followed = Events(queue, lambda record: asdict(_answer(record)))

    @app.post("/api/uploads", status_code=201)
    async def upload(request: Request, user: User) -> UploadAnswer:
        """Store a folder: a .tar.gz archive of regular files is the body of the request."""
        with tempfile.TemporaryFile() as file:
            async for part in request.stream():
                file.write(part)
            async with files.turn(user):
                digest = await run_in_threadpool(files.store, file, user, address_of(request))
            return UploadAnswer(upload=digest)

    @app.post("/api/searches", status_code=201)
    def submit(request: SearchRequest, user: User, http: Request) -> SearchAnswer:
        """Put a search into the queue."""
        submission = _submission(request)
        requests.check(submission)
        gpus, limits = requests.gpus(submission), users.limits(user)
        requests.check_limits(user, limits, gpus, request.priority)
        found = queue.submit(
            user,
            submission,
            gpus=gpus,
            priority=request.priority,
            deadline=requests.deadline(request.deadline),
            key=request.key,
            limits=limits,
            address=address_of(http),
        )
        return _answer(found)

    @app.get("/api/searches")
    def searches(user: User, before: Before = None) -> list[SearchAnswer]:
        """List your searches, the newest first; with `before`, those below that number."""
        return [_answer(each) for each in queue.searches(user, before=before, most=MOST)]

    @app.get("/api/searches/{number}")
    def search(number: Number, user: User) -> SearchAnswer:
        """Show a search."""
        return _answer(queue.search(number, user))

    @app.post("/api/searches/{number}/cancel")
    def cancel(number: Number, user: User, http: Request) -> SearchAnswer:
        """End a search; its finished trials stay."""
        return _answer(queue.cancel(number, user, address_of(http)))

    @app.post("/api/searches/{number}/resume")
    def resume(number: Number, user: User, http: Request) -> SearchAnswer:
        """Put a failed or cancelled search into the queue again."""
        return _answer(queue.resume(number, user, address_of(http), users.limits(user)))

    @app.get("/api/searches/{number}/events", response_class=StreamingResponse)
    async def events(
        number: Number,
        user: User,
        last_event_id: Annotated[int, Header(ge=0, le=LARGEST)] = 0,
    ) -> StreamingResponse:
        """Follow a search as server-sent events.

        The name of an event is that of a notice of the search. `state` tells of a change of the
        state, and `end` is the last. After an interruption, `Last-Event-ID` takes the stream up.
        """
        await run_in_threadpool(queue.search, number, user)
        return StreamingResponse(
            followed.stream(number, last_event_id),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store"},
        )


def _add_results(app: FastAPI, store: Store, queue: Queue, files: Files) -> None:
    def exported(number: int, user: str, form: str, partial: bool) -> str:
        record = queue.search(number, user)
        result = result_of(store, _study(store, record))
        if result is None:
            raise UsageError(f"search {number} has no plan that fits yet")
        return files.render(form, record, result, partial)

    @app.get("/api/searches/{number}/plan", response_class=PlainTextResponse)
    async def plan(
        number: Number,
        user: User,
        form: Annotated[
            str, Query(alias="format", description=", ".join(FORMATS), max_length=40)
        ] = "json",
        partial: bool = False,
    ) -> str:
        """Export the best plan, as `autofit best --format` does."""
        if form not in FORMATS:
            raise UsageError(f"there is no format {form!r}: formats are {', '.join(FORMATS)}")
        alone = files.turn(user) if form == READS_THE_SCRIPT else contextlib.nullcontext()
        async with alone:
            return await run_in_threadpool(exported, number, user, form, partial)

    @app.get("/api/searches/{number}/report", response_class=HTMLResponse)
    def report(number: Number, user: User) -> str:
        """Return the report, as `autofit report` writes it."""
        return page(read(store, _study(store, queue.search(number, user))))

    @app.get("/api/searches/{number}/study")
    def study(number: Number, user: User) -> JSONResponse:
        """Return the study with its finished trials, for the client's own store."""
        found = _study(store, queue.search(number, user))
        return JSONResponse(to_json(messages.copy_of(store, found)))


def _add_probes(app: FastAPI, queue: Queue, alive: Callable[[], bool]) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Say that the service runs: only a restart helps if there is no answer. Needs no token."""
        return {"status": "ok"}

    ready = Ready(queue, alive)

    @app.get("/readyz", responses={503: {}})
    def readyz() -> JSONResponse:
        """Say whether the store answers and searches can be started. It needs no token."""
        missing = ready.missing()
        return JSONResponse(
            {"error": missing} if missing else {"status": "ok"}, 503 if missing else 200
        )


def _submission(request: SearchRequest) -> Submission:
    words = [request.script] if isinstance(request.script, str) else request.script
    return Submission(
        script=tuple(words),
        args=tuple(request.args),
        module=request.module,
        folder=request.folder,
        upload=request.upload,
        options=request.options,
    )


def _answer(record: SearchRecord) -> SearchAnswer:
    submission = record.submission
    module = ("-m",) if submission.module else ()
    return SearchAnswer(
        id=record.id,
        user=record.user,
        state=record.state,
        script=" ".join((*module, *submission.script, *submission.args)),
        options=dict(submission.options),
        waits_for=record.waits_for,
        gpus=record.gpus,
        priority=record.priority,
        deadline=record.deadline,
        study=record.study,
        error=record.outcome,
        created=record.created,
        started=record.started,
        ended=record.ended,
    )


def _study(store: Store, record: SearchRecord) -> StudyRecord:
    if record.study is None:
        raise UsageError(f"search {record.id} is {record.state} and has measured nothing yet")
    return store.study(record.study)


class Ready:
    """Whether the service can do its work; asked often, it asks the store once a second."""

    def __init__(self, queue: Queue, alive: Callable[[], bool]) -> None:
        self._queue = queue
        self._alive = alive
        self._lock = threading.Lock()
        self._store = ""
        self._until = 0.0

    def missing(self) -> str:
        """Return what is missing; empty if nothing is."""
        with self._lock:
            if time.monotonic() >= self._until:
                try:
                    self._queue.users()
                    self._store = ""
                except StorageError:
                    self._store = "the store does not answer"
                self._until = time.monotonic() + _SURE
        return self._store or ("" if self._alive() else "Ray does not answer: it is started again")
