"""What a decorated function is given, and what next when that does not fit. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from autofit.exceptions import UsageError
from autofit.resilience.records import Rung

Reduce = Callable[[int], int]
"""From a size that did not fit, the next one to try."""


class Ladder(ABC):
    """The rungs of one decorated function, leanest last."""

    @abstractmethod
    def start(self, remembered: Mapping[str, int | str] | None) -> Rung:
        """Return the rung to begin with; ``remembered``: what held, as ``Rung.kept``."""

    @abstractmethod
    def leaner(self, rung: Rung) -> Rung | None:
        """Return the next rung down; ``None`` when there is none."""

    def off(self) -> Rung:
        """Return what the function is given while the decorators are off."""
        return self.start(None)

    def finished(self, rung: Rung) -> None:  # noqa: B027 - most have nothing to clean up
        """Clean up after an attempt, however it ended."""

    def kept(self, rung: Rung) -> Mapping[str, int | str]:
        """Return what to remember of a rung that held, as ``start`` takes it."""
        return dict(rung.kept)

    def refused(self, rung: Rung) -> bool:
        """Return whether the rung turned out to be one that cannot be tried here."""
        return False


class BatchSizes(Ladder):
    """Batch sizes from the one asked for down to ``smallest``, and the accumulation for each.

    Without ``reduce`` the next size is the largest that is at most half and divides the batch
    asked for, so that ``batch_size * accumulation`` stays exactly that; where the next such
    divisor is less than a quarter (a prime number of samples), half, and a warning.
    """

    def __init__(
        self,
        asked: int,
        *,
        smallest: int = 1,
        reduce: Reduce | None = None,
        accumulates: bool = False,
    ) -> None:
        if not 1 <= smallest <= asked:
            raise UsageError(
                f"batch_size is {asked} and smallest {smallest}: give 1 <= smallest <= batch_size"
            )
        self.asked = asked
        self.smallest = smallest
        self.accumulates = accumulates
        """Whether the function takes ``accumulation``."""
        self._reduce = reduce

    def start(self, remembered: Mapping[str, int | str] | None) -> Rung:
        """Return the size asked for, or a smaller one that is known to hold."""
        rung: Rung | None = self.rung(self.asked)
        known = (remembered or {}).get("batch_size", self.asked)
        while rung is not None and isinstance(known, int) and _size(rung) > known:
            rung = self.leaner(rung)
        return rung or self.rung(self.asked)

    def leaner(self, rung: Rung) -> Rung | None:
        """Return the next smaller size."""
        size = _size(rung)
        smaller = self._smaller(size) if self._reduce is None else self._reduce(size)
        if smaller >= size:
            raise UsageError(
                f"reduce({size}) returned {smaller}: it must return a smaller batch size"
            )
        return self.rung(int(smaller)) if smaller >= self.smallest else None

    def rung(self, size: int) -> Rung:
        """Return the rung with this batch size."""
        accumulation = -(-self.asked // size)
        shown = f"batch_size {size}"
        if self.accumulates:
            shown += f", accumulation {accumulation}"
        effective = size * (accumulation if self.accumulates else 1)
        return Rung(
            values=(size, accumulation) if self.accumulates else (size,),
            shown=shown,
            kept=(("batch_size", size),),
            warning="" if effective == self.asked else self._told(effective),
        )

    def _told(self, effective: int) -> str:
        hint = "" if self.accumulates else "; take accumulation as an argument to keep it"
        return f"the effective batch is {effective} instead of {self.asked}{hint}"

    def _smaller(self, size: int) -> int:
        half = max(size // 2, min(self.smallest, size - 1))
        if not self.accumulates:
            return half
        divisors = (each for each in range(half, 0, -1) if self.asked % each == 0)
        divisor = next(divisors, 0)
        return divisor if divisor > half // 2 else half


def _size(rung: Rung) -> int:
    size = dict(rung.kept)["batch_size"]
    assert isinstance(size, int)
    return size
