"""The pages of the service: queue, one search, a form for the token. They need no other site."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Annotated
from urllib.parse import parse_qs

import jinja2
from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from autofit.export import FORMATS
from autofit.printable import printable
from autofit.service.boundary import COOKIE, User, address_of
from autofit.service.gpus import Gpus
from autofit.service.users import Unauthorized, Users
from autofit.storage import Queue, SearchRecord, SearchState
from autofit.units import format_duration

MOST = 100
"""Searches of all users that the first page shows."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
}


def add_pages(app: FastAPI, queue: Queue, gpus: Gpus) -> None:
    """Add the pages to the application."""

    @app.get("/", include_in_schema=False)
    def index(
        user: User, before: Annotated[int, Query(ge=1, le=2**31 - 1)] | None = None
    ) -> HTMLResponse:
        found, active = queue.searches(user, before=before), queue.active(MOST)
        return _page(
            "index.html",
            user=user,
            searches=[_row(each) for each in found],
            most=MOST,
            waiting=[_row(each) for each in active if each.state is not SearchState.RUNNING],
            gpus=gpus.look(),
            now=datetime.now(UTC),
            duration=format_duration,
        )

    @app.get("/searches/{number}", include_in_schema=False)
    def search(number: Annotated[int, Path(ge=1, le=2**31 - 1)], user: User) -> HTMLResponse:
        record = queue.search(number, user)
        return _page("search.html", user=user, search=_row(record), formats=FORMATS)

    @app.get("/login", include_in_schema=False)
    def login() -> HTMLResponse:
        return _page("login.html", user="", problem="")

    @app.post("/login", include_in_schema=False)
    async def check_token(request: Request) -> Response:
        form = parse_qs((await request.body()).decode(errors="replace"))
        token = (form.get("token") or [""])[0].strip()
        users: Users = request.app.state.users
        try:
            await run_in_threadpool(users.user_of, f"Bearer {token}", address_of(request))
        except Unauthorized:
            return _page("login.html", 401, user="", problem="This token is not valid.")
        answer = RedirectResponse("/", 303)
        secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=secure)
        return answer

    @app.get("/static/{name}", include_in_schema=False)
    def static(name: str) -> PlainTextResponse:
        kinds = {"style.css": "text/css", "page.js": "text/javascript"}
        if name not in kinds:
            return PlainTextResponse("there is no such file", 404)
        return PlainTextResponse(_static(name), media_type=kinds[name])


@cache
def _static(name: str) -> str:
    """Return a file of the pages; the style is the report's, and what only these pages need."""
    own = resources.files("autofit.service").joinpath(name).read_text()
    if name != "style.css":
        return own
    return resources.files("autofit.report").joinpath("report.css").read_text() + own


def _row(record: SearchRecord) -> dict[str, object]:
    """Return what the pages show of a search."""
    seconds = None
    if record.started is not None and record.ended is not None:
        seconds = (record.ended - record.started).total_seconds()
    submission = record.submission
    return {
        "id": record.id,
        "user": record.user,
        "state": str(record.state),
        "script": _words((*(("-m",) if submission.module else ()), *submission.script)),
        "args": _words(submission.args),
        "waits_for": record.waits_for,
        "error": record.outcome.message if record.outcome else "",
        "created": record.created.strftime("%Y-%m-%d %H:%M UTC"),
        "duration": "" if seconds is None else format_duration(seconds),
        "study": record.study or "",
        "priority": record.priority,
        "deadline": f"{record.deadline:%Y-%m-%d %H:%M UTC}" if record.deadline else "",
        "ended": record.state.ended,
        "resumable": record.state in (SearchState.FAILED, SearchState.CANCELLED),
    }


def _words(words: Sequence[str]) -> str:
    return printable(" ".join(words))


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("autofit.service", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _page(name: str, code: int = 200, **values: object) -> HTMLResponse:
    text = _environment().get_template(name).render(**values)
    return HTMLResponse(text, code, headers=_HEADERS)
