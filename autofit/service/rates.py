"""Limits how often each client may ask: a token bucket for each of them, in memory."""

from __future__ import annotations

import math
import threading
import time

from autofit.exceptions import UsageError

BURST = 5.0
"""Seconds of requests that a client may send at once."""
_MOST = 10_000
"""Buckets that are kept; full ones are forgotten first."""


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
