"""The HTTP interface of the service. Its OpenAPI document is at ``/openapi.json``."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from autofit._version import __version__
from autofit.analysis.ranking import result_of
from autofit.analysis.result import Result
from autofit.client import archive, messages
from autofit.client.search import OF_THE_SERVICE
from autofit.exceptions import AutofitError, StorageError, UsageError
from autofit.export import FORMATS, render
from autofit.report.content import read
from autofit.report.page import page
from autofit.service import requests
from autofit.service.gpus import Gpus, GpusAnswer
from autofit.service.metrics import KIND
from autofit.service.metrics import metrics as figures_of
from autofit.service.observed import Observed
from autofit.service.own_uids import rights_of
from autofit.service.pages import add_pages
from autofit.service.rates import TooOften
from autofit.service.runner import name_of_upload
from autofit.service.users import OtherSite, Unauthorized, Users
from autofit.service.visitor import User, address_of
from autofit.storage import Accounts, Outcome, Queue, SearchRecord, Store, StudyRecord, Submission
from autofit.storage.convert import to_json
from autofit.storage.queue import NoSuchSearch
from autofit.tuning.options import flags
from autofit.worker.cluster.nodes import Node

POLL = 0.3
"""Seconds between two looks for new notices."""
SIGN_OF_LIFE = 15.0
"""Seconds after which a stream without events sends a comment."""
MOST = 100
"""Searches in one answer of the list."""
_OPTIONS = "; ".join(
    f"`{each.name}`: {flag.help}" for each, flag in flags() if each.name not in OF_THE_SERVICE
)


class SearchRequest(BaseModel):
    """A script, its folder and the options of the search."""

    model_config = ConfigDict(extra="forbid")

    script: str | list[str] = Field(
        description="The path of the script below its folder, the name of a module, or the words"
        " of a launch line."
    )
    args: list[str] = Field(default=[], description="Arguments of the script.")
    module: bool = Field(default=False, description="Whether `script` is the name of a module.")
    upload: str | None = Field(default=None, description="The folder, as `/api/uploads` named it.")
    folder: str | None = Field(
        default=None, description="The folder on storage that the service shares."
    )
    options: dict[str, Any] = Field(default={}, description=_OPTIONS)
    priority: int = Field(
        default=0,
        ge=-requests.MOST_PRIORITY,
        le=requests.MOST_PRIORITY,
        description="Searches with a higher priority start first.",
    )
    deadline: str | None = Field(
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
    alive: Callable[[], bool] = lambda: True,
    machines: Callable[[], Iterable[Node]] = tuple,
) -> FastAPI:
    """Return the application on a store.

    ``limit``: bytes of an uploaded folder; ``alive``: whether searches can be started;
    ``machines``: those of the Ray cluster.
    """
    app = FastAPI(
        title="autofit",
        version=__version__,
        description="Finds the fastest way to run the same PyTorch training inside a memory budget",
        docs_url=None,  # these pages load scripts from other servers
        redoc_url=None,
    )
    app.add_exception_handler(AutofitError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_request)
    app.add_exception_handler(HTTPException, _refuse_path)
    app.add_middleware(Observed)
    app.state.users = users
    queue = Queue(store)
    _add_routes(app, store, queue, users, limit)
    _add_figures(app, queue, alive)
    held = Gpus(queue, machines)

    @app.get("/api/gpus")
    def gpus(user: User) -> GpusAnswer:
        """Return the machines with GPUs, and who holds how many."""
        return held.look()

    add_pages(app, queue, held)
    return app


def _add_routes(app: FastAPI, store: Store, queue: Queue, users: Users, limit: int) -> None:
    accounts = Accounts(store)

    @app.post("/api/uploads", status_code=201)
    async def upload(request: Request, user: User) -> UploadAnswer:
        """Store a folder: a .tar.gz archive of regular files is the body of the request."""
        content = await _body(request, limit)
        digest = await run_in_threadpool(archive.digest, content, limit)
        await run_in_threadpool(queue.add_upload, digest, content)
        await run_in_threadpool(accounts.note, user, "upload", digest, address_of(request))
        return UploadAnswer(upload=digest)

    @app.post("/api/searches", status_code=201)
    def submit(request: SearchRequest, user: User, http: Request) -> SearchAnswer:
        """Put a search into the queue."""
        submission = _submission(request)
        requests.check(submission)
        if submission.upload is not None and not queue.has_upload(submission.upload):
            raise UsageError(f"there is no upload {submission.upload}: send the folder again")
        gpus = requests.gpus(submission)
        requests.check_limits(user, users.limits(user), gpus, request.priority)
        deadline = requests.deadline(request.deadline)
        found = queue.submit(
            user, submission, gpus=gpus, priority=request.priority, deadline=deadline
        )
        accounts.note(user, "submit", f"search {found.id}", address_of(http))
        return _answer(found)

    @app.get("/api/searches")
    def searches(user: User, before: int | None = None) -> list[SearchAnswer]:
        """List your searches, the newest first; with `before`, those below that number."""
        return [_answer(each) for each in queue.searches(user, before=before, most=MOST)]

    @app.get("/api/searches/{number}")
    def search(number: int, user: User) -> SearchAnswer:
        """Show a search."""
        return _answer(queue.search(number, user))

    @app.post("/api/searches/{number}/cancel")
    def cancel(number: int, user: User, http: Request) -> SearchAnswer:
        """End a search; its finished trials stay."""
        found = queue.cancel(number, user)
        accounts.note(user, "cancel", f"search {number}", address_of(http))
        return _answer(found)

    @app.post("/api/searches/{number}/resume")
    def resume(number: int, user: User, http: Request) -> SearchAnswer:
        """Put a failed or cancelled search into the queue again."""
        found = queue.resume(number, user)
        accounts.note(user, "resume", f"search {number}", address_of(http))
        return _answer(found)

    @app.get("/api/searches/{number}/events", response_class=StreamingResponse)
    async def events(
        number: int, user: User, last_event_id: Annotated[int, Header()] = 0
    ) -> StreamingResponse:
        """Follow a search as server-sent events.

        The name of an event is that of a notice of the search. `state` tells of a change of the
        state, and `end` is the last. After an interruption, `Last-Event-ID` takes the stream up.
        """
        await run_in_threadpool(queue.search, number, user)
        return StreamingResponse(
            _stream(queue, number, last_event_id),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store"},
        )

    @app.get("/api/searches/{number}/plan", response_class=PlainTextResponse)
    def plan(
        number: int,
        user: User,
        form: Annotated[str, Query(alias="format", description=", ".join(FORMATS))] = "json",
        partial: bool = False,
    ) -> str:
        """Export the best plan, as `autofit best --format` does."""
        if form not in FORMATS:
            raise UsageError(f"there is no format {form!r}: formats are {', '.join(FORMATS)}")
        record = queue.search(number, user)
        result = result_of(store, _study(store, record))
        if result is None:
            raise UsageError(f"search {number} has no plan that fits yet")
        if record.submission.upload is None:
            with rights_of(users.uid(user)):
                return render(form, result, partial=partial)
        return _export(queue, record.submission.upload, result, form, partial, limit)

    @app.get("/api/searches/{number}/report", response_class=HTMLResponse)
    def report(number: int, user: User) -> str:
        """Return the report, as `autofit report` writes it."""
        return page(read(store, _study(store, queue.search(number, user))))

    @app.get("/api/searches/{number}/study")
    def study(number: int, user: User) -> JSONResponse:
        """Return the study with its finished trials, for the client's own store."""
        found = _study(store, queue.search(number, user))
        return JSONResponse(to_json(messages.copy_of(store, found)))


def _add_figures(app: FastAPI, queue: Queue, alive: Callable[[], bool]) -> None:
    @app.get("/healthz")
    def healthz() -> JSONResponse:
        """Say whether the store answers and searches can be started; it needs no token."""
        queue.active()
        if not alive():
            return JSONResponse({"error": "the thread that starts searches has ended"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics(user: User) -> PlainTextResponse:
        """Return figures for Prometheus, of all users together."""
        return PlainTextResponse(figures_of(queue), media_type=KIND)


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


def _export(queue: Queue, upload: str, result: Result, form: str, partial: bool, limit: int) -> str:
    """Return the plan of an uploaded script in a format; its patch needs the file."""
    with tempfile.TemporaryDirectory(prefix="autofit-") as scratch:
        folder = name_of_upload(upload)
        if form == "patch":
            folder = str(Path(scratch, "files"))
            archive.unpack(queue.upload(upload), Path(folder), limit)
        return render(
            form, replace(result, script=replace(result.script, cwd=folder)), partial=partial
        )


async def _body(request: Request, limit: int) -> bytes:
    """Return the body of a request; refuse one above the limit before it is read to its end."""
    if int(request.headers.get("Content-Length") or 0) > limit:
        raise TooLarge(archive.too_large(limit))
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > limit:
            raise TooLarge(archive.too_large(limit))
    return bytes(content)


async def _stream(queue: Queue, number: int, last: int) -> AsyncIterator[str]:
    """Yield the events of a search until it ends."""
    state, quiet = "", 0.0
    while True:
        record = await run_in_threadpool(queue.search, number)  # first: later notices come next
        found = await run_in_threadpool(queue.notices, number, after=last)
        for notice in found:
            last = notice.id
            yield _event(notice.kind, notice.content, last)
        now = f"{record.state} {record.waits_for}"
        if record.state.ended and not found:
            yield _event("end", asdict(_answer(record)))
            return
        if now != state and not record.state.ended:
            state = now
            yield _event("state", asdict(_answer(record)))
        quiet = 0.0 if found else quiet + POLL
        if quiet >= SIGN_OF_LIFE:
            quiet = 0.0
            yield ": the search goes on\n\n"
        if not found:
            await asyncio.sleep(POLL)


def _event(kind: str, content: Any, number: int | None = None) -> str:
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {kind}\ndata: {json.dumps(content, default=str)}\n\n"


class TooLarge(UsageError):
    """An upload is above the limit."""


def _refuse(request: Request, error: Exception) -> Response:
    """Answer one of our errors: its message in one line. A browser is asked for its token."""
    page = not request.url.path.startswith("/api") and "html" in request.headers.get("Accept", "")
    if isinstance(error, Unauthorized) and page:
        return RedirectResponse("/login", 303)
    if isinstance(error, TooOften):
        wait = {"Retry-After": str(math.ceil(error.seconds))}
        return JSONResponse({"error": str(error)}, 429, wait)
    codes: tuple[tuple[type[Exception], int], ...] = (
        (TooLarge, 413),
        (Unauthorized, 401),
        (OtherSite, 403),
        (NoSuchSearch, 404),
        (UsageError, 400),
        (StorageError, 503),
    )
    code = next((code for kind, code in codes if isinstance(error, kind)), 500)
    return JSONResponse({"error": str(error)}, code)


def _refuse_request(request: Request, error: Exception) -> JSONResponse:
    """Answer a request that is not of the documented form: the first thing that is wrong."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(each) for each in first["loc"] if each != "body")
    return JSONResponse({"error": f"{where}: {first['msg']}; see /openapi.json"}, 422)


def _refuse_path(request: Request, error: Exception) -> JSONResponse:
    """Answer a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}; see /openapi.json"
    return JSONResponse({"error": text}, error.status_code)
