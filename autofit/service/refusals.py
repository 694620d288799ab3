"""How the service answers what it refuses: one line, as JSON, or as a page for a browser."""

from __future__ import annotations

import math

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from autofit.exceptions import StorageError, UsageError
from autofit.service import templates
from autofit.service.users import OtherSite, TooOften, Unauthorized
from autofit.storage.queue import NoSuchSearch, OverQuota

_LONGEST = 2000
"""Characters of a message."""


class TooLarge(UsageError):
    """The body of a request is above the limit."""


class TooSlow(UsageError):
    """The body of a request, or its answer, takes too long."""


class Busy(TooSlow):
    """The answer takes too long, and the client has sent all that it had to."""


_CODES: tuple[tuple[type[Exception], int], ...] = (
    (TooLarge, 413),
    (Busy, 503),
    (TooSlow, 408),
    (TooOften, 429),
    (Unauthorized, 401),
    (OtherSite, 403),
    (OverQuota, 403),
    (NoSuchSearch, 404),
    (UsageError, 400),
    (StorageError, 503),
)


def of_error(request: Request, error: Exception) -> Response:
    """Return the answer for one of our errors. A browser is asked for its token."""
    if isinstance(error, Unauthorized) and _for_a_person(request):
        return RedirectResponse("/login", 303)
    wait = {"Retry-After": str(math.ceil(error.seconds))} if isinstance(error, TooOften) else {}
    text = str(error)
    if isinstance(error, StorageError):  # its message names the address of the database
        text = "the store does not answer: try again, or ask who runs the service"
    code = next((code for kind, code in _CODES if isinstance(error, kind)), 500)
    return _answer(request, text, code, wait)


def of_request(request: Request, error: Exception) -> Response:
    """Return the answer for a request that is not of the documented form: what is wrong first."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(each) for each in first["loc"] if each != "body")
    return _answer(request, f"{where}: {first['msg']}; see /openapi.json", 422)


def of_path(request: Request, error: Exception) -> Response:
    """Return the answer for a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}; see /openapi.json"
    return _answer(request, text, error.status_code)


def _for_a_person(request: Request) -> bool:
    return "text/html" in request.headers.get("Accept", "")


def _answer(
    request: Request, text: str, code: int, headers: dict[str, str] | None = None
) -> Response:
    """Return an answer; a message that quotes a request may hold lone surrogates."""
    line = text[:_LONGEST].encode(errors="backslashreplace").decode()
    if not _for_a_person(request):
        return JSONResponse({"error": line}, code, headers)
    page = templates.page(request, "error.html", code, error=line)
    page.headers.update(headers or {})
    return page
