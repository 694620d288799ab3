"""What stands in front of every route: who asks, how much is sent, for how long, from how many."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from http.cookies import CookieError, SimpleCookie
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from autofit.client import archive
from autofit.exceptions import AutofitError, UsageError
from autofit.service import refusals
from autofit.service.users import COOKIE, TooOften, Users
from autofit.units import format_size

PROBES = ("/healthz", "/readyz")
"""Paths that are answered to everybody, under any name of this machine."""
STATIC = ("/static/style.css", "/static/page.js", "/static/icon.svg", "/favicon.ico")
"""Paths of the files that pages load."""
PUBLIC = (*PROBES, "/login", "/openapi.json", *STATIC)
"""Paths that need no token."""
UPLOADS = "/api/uploads"
"""The path whose body may be as large as an uploaded folder."""
MOST_BODY = 256 << 10
"""Bytes of the body of any other request."""
ANSWER = 60.0
"""Seconds within which an answer has to begin, besides the time for the body."""
SLOWEST = 64 << 10
"""Bytes of a body that have to arrive in a second, on average."""
LINGER = 2.0
"""Seconds for which the body of a refused request is read and dropped.

A client that sends before it reads would otherwise find a reset connection, not the answer.
"""
HEAD = 10.0
"""Seconds within which the head of a request has to arrive."""
WAITING = 4096
"""Connections that may wait to be accepted; Linux takes no more by default."""
CONNECTIONS = 500
"""Connections at a time; systemd allows a service 1,024 files by default."""


class Boundary:
    """Middleware that lets a request through once its user is known, with a bounded body.

    A public request has the user ``""``. Routes find the user in ``request.state.user``.
    """

    def __init__(self, app: ASGIApp, users: Users, limit: int, connections: int) -> None:
        """``limit``: bytes of an uploaded folder; ``connections``: of all clients together."""
        self._app = app
        self._users = users
        self._limit = limit
        self._most = max(1, connections // 2)
        """Requests of one user at a time; those that follow a search last as long as it."""
        self._active: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it before its body is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        most = self._limit if request.url.path == UPLOADS else MOST_BODY
        bounded = _Bounded(receive, send, most)
        user = ""
        try:
            user = await self._user(request)
            request.state.user = user
            bounded.check_length(request.headers.get("Content-Length"))
            self._active[user] += 1
            try:
                await bounded.run(self._app, scope)
            finally:
                self._active -= Counter([user])
        except AutofitError as error:
            await _refuse(request, error, receive, send, bounded.most)

    async def _user(self, request: Request) -> str:
        """Return who asks; raise one of our errors if the request is refused."""
        path = request.url.path
        if path in PROBES:
            return ""
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        given = request.headers.get("Authorization")
        if given is None and (token := _cookie(request.headers.get("Cookie", ""))):
            given = f"Bearer {token}"
        if given is None and path not in PUBLIC and self._users.closed:
            self._users.refuse(address_of(request))  # many strangers cost no thread and no query
        await run_in_threadpool(self._users.check_site, host, origin)
        if path in PUBLIC:
            return ""
        user = await run_in_threadpool(self._users.user_of, given, address_of(request))
        if self._active[user] >= self._most:
            raise TooOften(1.0)
        return user


class _Bounded:
    """One request: counts what arrives, and ends the wait for a body or an answer."""

    def __init__(self, receive: Receive, send: Send, most: int) -> None:
        self.most = most
        self._receive = receive
        self._send = send
        self._got = 0
        self._whole = False
        """Whether all of the body has arrived."""
        self._answered = False
        """Whether the answer has begun."""
        self._refusal: AutofitError | None = None

    def check_length(self, length: str | None) -> None:
        """Raise ``TooLarge`` if the client says that its body is above the limit."""
        if int(length or 0) > self.most:
            raise self._too_large()

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Let ``app`` answer; raise one of our errors if the request is refused meanwhile."""
        try:
            async with asyncio.timeout(ANSWER) as self._limit:
                self._began = asyncio.get_running_loop().time()
                await app(scope, self._bounded_receive, self._noted_send)
        except TimeoutError:
            if self._answered:
                raise
            kind = refusals.Busy if self._whole else refusals.TooSlow
            self._refusal = kind("the request took too long: send it again")
        if self._refusal is not None and not self._answered:
            raise self._refusal

    async def _bounded_receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._got += len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
            if self._got > self.most:
                self._refusal = self._too_large()
            elif not self._answered:
                self._limit.reschedule(self._began + ANSWER + self._got / SLOWEST)
        elif not (self._whole or self._answered):
            self._refusal = UsageError("the client went away before it had sent its request")
        if self._refusal is not None:
            raise self._refusal  # the application may answer it, but this object's answer counts
        return message

    async def _noted_send(self, message: Message) -> None:
        if self._refusal is not None and not self._answered:
            return
        if message["type"] == "http.response.start":
            self._answered = True
            self._limit.reschedule(None)
        await self._send(message)

    def _too_large(self) -> AutofitError:
        if self.most == MOST_BODY:
            return refusals.TooLarge(f"the request has more than {format_size(MOST_BODY)}")
        return refusals.TooLarge(archive.too_large(self.most))


async def _refuse(
    request: Request, error: AutofitError, receive: Receive, send: Send, most: int
) -> None:
    """Answer a request that is refused, and drop up to ``most`` bytes of its body."""
    answer = refusals.of_error(request, error)
    answer.headers["Connection"] = "close"

    async def keep_open(message: Message) -> None:
        body = message["type"] == "http.response.body"
        await send({**message, "more_body": True} if body else message)

    await answer(request.scope, receive, keep_open)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            dropped = 0
            while dropped <= most and (message := await receive()).get("more_body", False):
                dropped += len(message["body"])
    await send({"type": "http.response.body"})


def _cookie(text: str) -> str:
    """Return the token in the header of a browser; empty if there is none."""
    try:
        found = SimpleCookie(text).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


def address_of(request: Request) -> str:
    """Return the network address of the client, behind those proxies that the service trusts."""
    return "" if request.client is None else request.client.host


def user_of(request: Request) -> str:
    """Return the user that the boundary has found."""
    found: str = request.state.user
    return found


User = Annotated[str, Depends(user_of)]
"""The type of a parameter that gets the user's name."""


def protocol(most: int) -> type[H11Protocol]:
    """Return the class of connections of one server: ``most`` at a time.

    One more ends the connection that has waited longest without a request. So connections on which
    nothing is asked, or slowly, keep nobody out.
    """
    waiting: dict[Connection, asyncio.TimerHandle] = {}

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait()
            if len(self.connections) > most:
                next(iter(waiting))._end()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._wait_no_longer()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete and not self.transport.is_closing():
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._wait_no_longer()
            super().connection_lost(exc)

        def _wait(self) -> None:
            waiting[self] = self.loop.call_later(HEAD, self._end)

        def _wait_no_longer(self) -> None:
            if (timer := waiting.pop(self, None)) is not None:
                timer.cancel()

        def _end(self) -> None:
            self._wait_no_longer()
            self.transport.abort()

    return Connection


class Server(uvicorn.Server):
    """A server before which many connections may wait to be accepted.

    Linux drops one for which there is no place. Its client tries again after 1, 3, 7 ... s.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; asyncio accepts as many at a time as may wait, so it is told a smaller number."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(WAITING)


def settings(most: int, proxies: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of ``uvicorn.Config``: ``most`` connections, and trusted ``proxies``."""
    return {
        "http": protocol(most),
        "backlog": 128,  # so many may be accepted before one is ended
        "proxy_headers": bool(proxies),
        "forwarded_allow_ips": list(proxies),
        "timeout_graceful_shutdown": 2,
    }
