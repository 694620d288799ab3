"""What held, by function and arguments: where the next call starts."""

from __future__ import annotations

from collections.abc import Mapping

from autofit.resilience.shapes import Key

Kept = Mapping[str, int | str]


class Memory:
    """What one decorated function remembers."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._known: dict[Key, Kept] = {}

    def recall(self, key: Key) -> Kept | None:
        """Return what held last for such a call."""
        return self._known.get(key)

    def remember(self, key: Key, kept: Kept) -> None:
        """Keep what held, if that is news."""
        if self._known.get(key) != kept:
            self._known[key] = dict(kept)

    def forget(self) -> None:
        """Start every call where it was asked to."""
        self._known.clear()
