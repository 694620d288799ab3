"""Logs each request, and hands it to OpenTelemetry if that is installed."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOG = logging.getLogger("autofit.service")
"""The service's logger; a request has the attribute ``fields``."""


_EVENTS = b"text/event-stream; charset=utf-8"


class JsonLines(logging.Formatter):
    """Formats each record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line: the time in UTC, level, logger, message, and the record's ``fields``."""
        found = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


def log_json() -> None:
    """Make this process log to standard error as lines of JSON, the requests included."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    LOG.setLevel(logging.INFO)


class Observed:
    """Middleware around the application."""

    def __init__(self, app: ASGIApp, seen: Callable[[str, str, int, float], None]) -> None:
        """``seen`` is called with the route, method, status and seconds of each request."""
        self._app = app
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and note its user, status and duration."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, stream = time.monotonic(), 500, False

        async def forward(message: Message) -> None:
            nonlocal status, stream
            stream = stream or (b"content-type", _EVENTS) in message.get("headers", ())
            status = message.get("status", status)
            await send(message)

        with _span(scope) as span:
            try:
                await self._app(scope, receive, forward)
            finally:
                fields = {
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "user": scope.get("state", {}).get("user", ""),
                    "address": (scope.get("client") or [""])[0],
                    "milliseconds": round(1000 * (time.monotonic() - began), 1),
                }
                LOG.info("request", extra={"fields": fields})
                route = getattr(scope.get("route"), "path", "")
                if not stream:
                    method = scope["method"] if route else ""
                    self._seen(route, method, status, time.monotonic() - began)
                if span is not None:
                    route = route or scope["path"]
                    span.update_name(f"{scope['method']} {route}")
                    span.set_attribute("http.response.status_code", status)


@cache
def _opentelemetry() -> tuple[Any, Any] | None:
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        return None
    return propagate, trace


@contextlib.contextmanager
def _span(scope: Scope) -> Iterator[Any]:
    """Yield the span of a request; ``None`` without OpenTelemetry.

    It belongs to the trace that the client's header names, and goes where the process's tracer
    provider sends it: nowhere, unless ``opentelemetry-instrument`` or the program has set one.
    """
    if (found := _opentelemetry()) is None:
        yield None
        return
    propagate, trace = found
    headers = {name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]}
    with trace.get_tracer("autofit").start_as_current_span(
        scope["method"],
        context=propagate.extract(headers),
        kind=trace.SpanKind.SERVER,
        attributes={"http.request.method": scope["method"], "url.path": scope["path"]},
    ) as span:
        yield span
