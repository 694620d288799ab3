"""Fills the templates of the pages."""

from __future__ import annotations

from functools import cache

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse

from autofit.service.users import COOKIE
from autofit.units import format_size

_HEADERS = {
    "Cache-Control": "no-store",  # after a logout, "back" shows nothing
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
}


def page(request: Request, name: str, code: int = 200, **values: object) -> HTMLResponse:
    """Return a page, whose template gets ``values``; they are escaped."""
    user = getattr(request.state, "user", "")
    text = (
        _environment()
        .get_template(name)
        .render(user=user, signed_in=bool(user) and COOKIE in request.cookies, code=code, **values)
    )
    return HTMLResponse(text, code, headers=_HEADERS)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autofit.service", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["size"] = format_size
    return environment
