"""The pages of the service: searches, one search, two side by side, a form for the token.

They need no other site.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from functools import cache
from importlib import resources
from typing import Annotated, Literal
from urllib.parse import parse_qs, urlencode

from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from autofit.analysis.studies import Side, stored_study
from autofit.exceptions import UsageError
from autofit.export import FORMATS
from autofit.service.boundary import User, address_of
from autofit.service.gpus import Gpus
from autofit.service.templates import page
from autofit.service.users import COOKIE, Unauthorized, Users
from autofit.storage import Queue, SearchRecord, SearchState, Store
from autofit.text import printable
from autofit.units import format_duration
from autofit.view import history

MOST = 100
"""Searches of all users that the first page shows."""
PAGE = 25
"""Searches of the user on a page."""
_FILES = {
    "style.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
Number = Annotated[int, Path(ge=1, le=2**31 - 1)]
Before = Annotated[int, Query(ge=1, le=2**31 - 1)]
Text = Annotated[str, Query(max_length=200)]
Chosen = Annotated[tuple[Before, ...], Query(max_length=100)]


def add_pages(app: FastAPI, store: Store, queue: Queue, gpus: Gpus) -> None:
    """Add the pages to the application."""

    @app.get("/", include_in_schema=False)
    def index(
        request: Request,
        user: User,
        before: Before | None = None,
        script: Text = "",
        state: SearchState | Literal[""] = "",
        until: date | Literal[""] = "",
        whose: Text = "",
    ) -> HTMLResponse:
        found = queue.searches(
            user,
            before=before,
            most=PAGE + 1,
            script=script,
            state=state or None,
            until=datetime.combine(until, time.max, UTC) if until else None,
        )
        active, look = queue.active(MOST), gpus.look()
        wanted = {"script": script, "state": state, "until": until, "whose": whose}
        given = {name: str(value) for name, value in wanted.items() if value}
        older = urlencode({**given, "before": found[PAGE - 1].id}) if len(found) > PAGE else ""
        return page(
            request,
            "index.html",
            searches=[_row(each) for each in found[:PAGE]],
            wanted=wanted,
            given=given,
            before=before,
            older=older,
            states=[*SearchState],
            users=sorted({each.user for each in active} | ({whose} - {""})),
            waiting=[
                _row(each)
                for each in active
                if each.state is not SearchState.RUNNING and whose in ("", each.user)
            ],
            holders=[each for each in look.holders if whose in ("", each.user)],
            gpus=look,
            more=len(active) == MOST,
            now=datetime.now(UTC),
            duration=format_duration,
        )

    @app.get("/searches/{number}", include_in_schema=False)
    def search(request: Request, number: Number, user: User) -> HTMLResponse:
        record = queue.search(number, user)
        return page(request, "search.html", search=_row(record), formats=FORMATS)

    @app.get("/compare", include_in_schema=False)
    def compare(
        request: Request,
        user: User,
        search: Chosen = (),
    ) -> HTMLResponse:
        if len(search) != 2:
            raise UsageError(f"{len(search)} searches are chosen: choose two of them")
        records = [queue.search(number, user) for number in search]
        studies = [
            stored_study(store, store.study(record.study)) for record in records if record.study
        ]
        if len(studies) != 2:
            raise UsageError("a search that has measured nothing yet cannot be compared")
        one, other = (Side(study=each.study, trial=each.winner) for each in studies)
        names = (f"search {search[0]}", f"search {search[1]}")
        return page(
            request,
            "compare.html",
            names=names,
            numbers=search,
            rows=history.rows(one, other),
            conclusion=history.conclusion(one, other, names),
            titles=history.TRIALS,
            trials=[[*history.trial_rows(each)] for each in studies],
        )

    @app.get("/login", include_in_schema=False)
    def login(request: Request) -> HTMLResponse:
        return page(request, "login.html", problem="")

    @app.post("/login", include_in_schema=False)
    async def check_token(request: Request) -> Response:
        form = parse_qs((await request.body()).decode(errors="replace"))
        token = (form.get("token") or [""])[0].strip()
        users: Users = request.app.state.users
        try:
            await run_in_threadpool(users.user_of, f"Bearer {token}", address_of(request))
        except Unauthorized:
            return page(request, "login.html", 401, problem="This token is not valid.")
        answer = RedirectResponse("/", 303)
        secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=secure)
        return answer

    @app.post("/logout", include_in_schema=False)
    def logout(user: User) -> Response:
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(COOKIE)
        return answer

    @app.get("/static/{name}", include_in_schema=False)
    def static(name: str) -> PlainTextResponse:
        if name not in _FILES:
            return PlainTextResponse("there is no such file", 404)
        return PlainTextResponse(_static(name), media_type=_FILES[name])

    @app.get("/favicon.ico", include_in_schema=False)  # of a report, which is one file
    def favicon() -> Response:
        return RedirectResponse("/static/icon.svg")


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
        "traceback": printable(record.outcome.traceback, keep="\n") if record.outcome else "",
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
