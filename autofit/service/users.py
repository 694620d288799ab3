"""Who may use the service, and how often.

The store holds digests of tokens alone. Each client has a token bucket for its requests, in memory.
"""

from __future__ import annotations

import getpass
import hashlib
import math
import re
import secrets
import threading
import time
from datetime import datetime
from typing import NoReturn
from urllib.parse import urlsplit

from autofit.exceptions import UsageError
from autofit.service.requests import MOST_PRIORITY
from autofit.storage import Accounts, Limits, Queue, Store

COOKIE = "autofit_token"
"""The cookie that holds the token of a browser's user."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
BURST = 5.0
"""Seconds of requests that a client may send at once."""
_MOST = 10_000
"""Buckets that are kept; full ones are forgotten first."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class Unauthorized(UsageError):
    """A request has no valid token."""


class OtherSite(UsageError):
    """A browser sent a request for the page of another site."""


class Users:
    """The users of a service. Without any token in the store, everybody is the service's own user.

    Scripts of users with tokens run under a uid for each user, unless there is an ``obstacle`` or
    the users are ``trusted``. With an obstacle, a second user is refused who is not trusted.
    """

    def __init__(
        self, store: Store, *, trusted: bool, obstacle: str = "", rate: float = math.inf
    ) -> None:
        """``rate``: requests a second of each user, and of each address without a valid token."""
        self._queue = Queue(store)
        self._accounts = Accounts(store)
        self._rates = Rates(rate)
        self._trusted = trusted
        self._obstacle = obstacle
        self.apart = not (trusted or obstacle)
        """Whether each user's scripts run under a uid of their own."""
        self.closed = False
        """Whether a token was seen in the store; since then, every request needs one."""

    def check(self, host: str) -> None:
        """Raise ``UsageError`` if the service must not start on this address."""
        names = self._queue.users()
        if host not in LOOPBACK and not names:
            raise UsageError(
                f"--host {host}: without a token, everybody who reaches it could run programs here."
                " Make one first: autofit token create NAME"
            )
        self._check_trust(names)

    def user_of(self, authorization: str | None, address: str) -> str:
        """Return the user of a request by its header.

        ``address``: that of the client. Raises ``Unauthorized`` if the header has no valid token,
        and ``TooOften`` if the user, or the address without a token, asks too often.
        """
        names = self._queue.users()
        if not names:
            self._rates.take(address)
            return getpass.getuser()
        self.closed = True
        self._check_trust(names)
        kind, _, token = (authorization or "").partition(" ")
        bearer = bool(token) and kind.lower() == "bearer"
        user = self._queue.user_of(_digest(token.strip())) if bearer else None
        if user is None:
            self.refuse(address, noted=bool(token))
        self._rates.take(f"user {user}")
        return user

    def refuse(self, address: str, *, noted: bool = False) -> NoReturn:
        """Raise ``Unauthorized`` for a request without a valid token, or ``TooOften``.

        ``noted``: add a line to the audit trail.
        """
        self._rates.take(address)
        if noted:
            self._accounts.note("", "refused", "a token that is not valid", address)
        raise Unauthorized(
            "the request has no valid token: set AUTOFIT_TOKEN, or send the header"
            " Authorization: Bearer TOKEN"
        )

    def check_site(self, host: str, origin: str | None) -> None:
        """Raise ``OtherSite`` for a request that a page of another site made a browser send.

        ``host`` and ``origin``: headers of the request. Without tokens, a site could also give its
        own name the address of this machine, so only names of loopback are answered.
        """
        if origin is not None and origin.partition("://")[2] != host:
            raise OtherSite(f"the request comes from a page of {origin}: open this service instead")
        name = _host(host)
        if name not in LOOPBACK and not (self.closed or self._queue.users()):
            raise OtherSite(
                f"the service has no tokens, so it answers at {LOOPBACK[0]} only, not at {name!r}:"
                " autofit token create NAME"
            )

    def limits(self, user: str) -> Limits:
        """Return what a user may have; without tokens, everything."""
        if not self._queue.users():
            return Limits(priority=MOST_PRIORITY)
        return self._accounts.limits(user)

    def uid(self, user: str) -> int | None:
        """Return the uid of a user's scripts; ``None`` if they run as the service does."""
        if not self.apart or not self._queue.users():
            return None
        return self._accounts.uid(user)

    def _check_trust(self, names: tuple[str, ...]) -> None:
        if len(names) > 1 and self._obstacle and not self._trusted:
            raise UsageError(
                f"tokens of several users exist ({', '.join(names)}), and their scripts would run"
                f" under one uid ({self._obstacle}): they could read each other's files. If they"
                " may, start the service with --trusted-users"
            )


def create_token(
    store: Store, user: str, limits: Limits | None = None, *, expires: datetime | None = None
) -> str:
    """Return a new token for a user, and store its digest.

    ``limits``: what the user may have from now on; ``None`` leaves that as it is. ``expires``: from
    when on the token is refused; ``None`` for never. Raises
    ``UsageError`` for a name that is not made of letters, digits and ``._@-``.
    """
    if not _NAME.fullmatch(user):
        raise UsageError(f"{user!r} is not a valid user name: use letters, digits and . _ @ - only")
    token = f"autofit_{secrets.token_urlsafe(32)}"
    Queue(store).add_token(user, _digest(token), expires)
    accounts = Accounts(store)
    if limits is not None:
        accounts.limit(user, limits)
    accounts.note(getpass.getuser(), "token", user)
    return token


def revoke_tokens(store: Store, user: str, number: int | None = None) -> int:
    """Refuse the tokens of a user from now on, or the one with this number; return how many.

    Raises ``UsageError`` if there is none.
    """
    count = Queue(store).revoke(user, number)
    if not count:
        raise UsageError(
            f"{user} has no valid token of this number: `autofit token list` shows them"
        )
    target = user if number is None else f"{user}, number {number}"
    Accounts(store).note(getpass.getuser(), "revoke", target)
    return count


def _host(header: str) -> str:
    """Return the name in the header ``Host``, without its port; empty if it is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _digest(token: str) -> str:
    """Return SHA-256 of a token. It has 256 random bits, so a slow hash would add nothing."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


class TooOften(UsageError):
    """A client asks too often."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"too many requests: try again in {seconds:.1f} s")
        self.seconds = seconds
        """After which it may ask again."""


class Rates:
    """The buckets of all clients; methods may be called from any thread."""

    def __init__(self, rate: float) -> None:
        """``rate``: requests a second of each client; ``math.inf`` for any number."""
        self._rate = rate
        self._most = max(1.0, rate * BURST)
        self._buckets: dict[str, tuple[float, float]] = {}
        """What is left for each client, and when that was so."""
        self._lock = threading.Lock()

    def take(self, client: str) -> None:
        """Count a request of a client; raise ``TooOften`` if it has to wait."""
        if self._rate == math.inf:
            return
        now = time.monotonic()
        with self._lock:
            if len(self._buckets) >= _MOST:
                self._buckets = {name: b for name, b in self._buckets.items() if not self._full(b)}
            left, since = self._buckets.get(client, (self._most, now))
            left = min(self._most, left + (now - since) * self._rate)
            if left < 1.0:
                raise TooOften((1.0 - left) / self._rate)
            self._buckets[client] = left - 1.0, now

    def _full(self, bucket: tuple[float, float]) -> bool:
        left, since = bucket
        return left + (time.monotonic() - since) * self._rate >= self._most
