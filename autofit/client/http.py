"""Talks HTTP to a service, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from autofit.exceptions import AutofitError, UsageError, WorkerError

TOKEN = "AUTOFIT_TOKEN"
"""Environment variable with the user's token."""
LOST = 120.0
"""Seconds without an answer after which the service counts as lost; it may be restarted."""
ANSWER = 60.0
"""Seconds within which the service has to answer a request, or to send a sign of life."""
TOO_MANY = 429
"""The status of an answer to a client that asks too often."""
_PAUSE = 1.0
_RESTARTED = (502, 503, 504)
"""Answers of a service, or of the proxy before it, that is not ready at the moment."""
_LOST_ERRORS = (OSError, http.client.HTTPException)
"""They include ``urllib.error.HTTPError``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvent:
    """One server-sent event."""

    id: str
    """Empty if the event has none."""
    kind: str
    content: Any


class Service:
    """The service at a URL.

    Every method raises ``UsageError`` if the service refuses the request, and ``WorkerError`` if it
    does not answer.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        """``say`` receives a line when a request is tried again for some time."""
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--server {url}: give a URL, such as http://gpu-server:8600")
        self.url = url.rstrip("/")
        self.token = os.environ.get(TOKEN) if token is None else token
        self._say = say
        self._waits = False
        """Whether it was said that requests are tried again."""

    def get(self, path: str, **query: Any) -> Any:
        """Return the JSON that the service answers."""
        return json.loads(self._answer("GET", path + ("?" + urlencode(query) if query else "")))

    def text(self, path: str, **query: Any) -> str:
        """Return the text that the service answers."""
        return self._answer("GET", path + ("?" + urlencode(query) if query else "")).decode()

    def post(self, path: str, content: Any = None) -> Any:
        """Send JSON, or bytes as they are, and return the JSON that the service answers."""
        if isinstance(content, bytes):
            return json.loads(self._answer("POST", path, content, "application/gzip"))
        data = json.dumps(content).encode()
        return json.loads(self._answer("POST", path, data, "application/json"))

    def events(self, path: str) -> Iterator[ServerEvent]:
        """Yield server-sent events until the service ends the stream; go on after a lost line."""
        last, heard = "", time.monotonic()
        while True:
            try:
                with self._open("GET", path, headers={"Last-Event-ID": last} if last else {}) as s:
                    for event in _parsed(s):
                        heard = time.monotonic()
                        if event is None:
                            continue
                        last = event.id or last
                        yield event
                        if event.kind == "end":
                            return
                time.sleep(_PAUSE)  # the service is restarted
            except _LOST_ERRORS as error:
                self._wait(error, heard)

    def _answer(
        self, method: str, path: str, data: bytes | None = None, kind: str | None = None
    ) -> bytes:
        """Return the body of the answer; try again while a service or its store is restarted.

        So a request may arrive twice. Those that would count twice carry a key.
        """
        began = time.monotonic()
        while True:
            try:
                with self._open(method, path, data, {"Content-Type": kind} if kind else {}) as s:
                    body: bytes = s.read()
                    return body
            except _LOST_ERRORS as error:
                self._wait(error, began)

    def _wait(self, error: OSError | http.client.HTTPException, since: float) -> None:
        """Wait until a request can be sent again that has failed.

        Raises one of our errors if it would fail again, or the service counts as lost.
        """
        over, pause = time.monotonic() - since > LOST, _PAUSE
        if isinstance(error, urllib.error.HTTPError):
            if over or error.code not in (TOO_MANY, *_RESTARTED):
                raise _refusal(error) from error
            pause = float(error.headers.get("Retry-After") or _PAUSE)
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise UsageError(
                f"the certificate of {self.url} is not accepted ({reason.verify_message}); if its"
                " issuer is not known here, name the issuer's certificate in SSL_CERT_FILE"
            ) from error
        if over:
            raise WorkerError(
                f"the service at {self.url} does not answer ({reason}): is `autofit serve` running"
                " there? A submitted search goes on without this command"
            ) from error
        if not self._waits:
            self._waits = True
            self._say(f"{self.url} cannot answer now ({reason}): trying again for {LOST:.0f} s")
        time.sleep(pause)

    def _open(
        self, method: str, path: str, data: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> Any:
        request = urllib.request.Request(self.url + path, data, dict(headers), method=method)
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        answer = urllib.request.urlopen(request, timeout=ANSWER)
        self._waits = False
        return answer


def _refusal(error: urllib.error.HTTPError) -> AutofitError:
    try:
        message = str(json.loads(error.read())["error"])
    except (ValueError, LookupError, TypeError, OSError):
        message = f"it answered {error.code} {error.reason}: is it an autofit service?"
    kind = WorkerError if error.code >= 500 else UsageError
    return kind(f"the service says: {message}")


def _parsed(stream: Any) -> Iterator[ServerEvent | None]:
    """Yield the events of a stream, and ``None`` for each sign of life.

    The format is that of https://html.spec.whatwg.org/multipage/server-sent-events.html.
    """
    fields: dict[str, str] = {}
    for raw in stream:
        line = raw.decode().rstrip("\r\n")
        if line:
            name, _, value = line.partition(":")
            if not name:
                yield None
            fields[name] = value.removeprefix(" ")
        elif "data" in fields:
            yield ServerEvent(
                id=fields.get("id", ""),
                kind=fields.get("event", "message"),
                content=json.loads(fields["data"]),
            )
            fields = {}
