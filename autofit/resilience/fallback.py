"""The settings that attempts of a decorated function try, in order. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from autofit.exceptions import UsageError
from autofit.resilience.records import Setting

Reduce = Callable[[int], int]
"""Returns the next batch size to try after one that did not fit."""


class Fallback(ABC):
    """The settings of one decorated function, from the first to the one that needs least memory."""

    @abstractmethod
    def start(self, remembered: Mapping[str, int | str] | None) -> Setting:
        """Return the first setting.

        ``remembered``: what ``to_remember`` returned for the setting that fitted last, if any.
        """

    @abstractmethod
    def leaner(self, setting: Setting) -> Setting | None:
        """Return the next setting, which needs less memory; ``None`` if there is none."""

    def when_off(self) -> Setting:
        """Return the setting that is used while the decorators are off."""
        return self.start(None)

    def clean_up(self, setting: Setting) -> None:  # noqa: B027 - batch sizes need no clean-up
        """Clean up after an attempt, whether it succeeded or failed."""

    def to_remember(self, setting: Setting) -> Mapping[str, int | str]:
        """Return the record of a setting that fitted, in the form that ``start`` accepts."""
        return dict(setting.to_remember)

    def is_refused(self, setting: Setting) -> bool:
        """Return whether the last attempt found that the setting cannot be used."""
        return False


class BatchSizes(Fallback):
    """Batch sizes from the requested one down to ``smallest``, each with its accumulation.

    Without ``reduce``, the next size is the largest divisor of the requested size that is at most
    half the current one. So ``batch_size * accumulation`` stays equal to the requested size. If
    that divisor is less than a quarter, as for a prime number, the next size is half, and a warning
    gives the new effective batch.
    """

    def __init__(
        self,
        requested: int,
        *,
        smallest: int = 1,
        reduce: Reduce | None = None,
        accumulates: bool = False,
    ) -> None:
        if not 1 <= smallest <= requested:
            raise UsageError(
                f"batch_size is {requested} and smallest {smallest}:"
                " give 1 <= smallest <= batch_size"
            )
        self.requested = requested
        self.smallest = smallest
        self.accumulates = accumulates
        """Whether the function has a parameter ``accumulation``."""
        self._reduce = reduce

    def start(self, remembered: Mapping[str, int | str] | None) -> Setting:
        """Return the requested size, or a smaller one that fitted before."""
        setting: Setting | None = self.setting(self.requested)
        known = (remembered or {}).get("batch_size", self.requested)
        while setting is not None and isinstance(known, int) and _size(setting) > known:
            setting = self.leaner(setting)
        return setting or self.setting(self.requested)

    def leaner(self, setting: Setting) -> Setting | None:
        """Return the next smaller size."""
        size = _size(setting)
        smaller = self._smaller(size) if self._reduce is None else self._reduce(size)
        if smaller >= size:
            raise UsageError(
                f"reduce({size}) returned {smaller}: it must return a smaller batch size"
            )
        return self.setting(int(smaller)) if smaller >= self.smallest else None

    def setting(self, size: int) -> Setting:
        """Return the setting for a batch size."""
        accumulation = -(-self.requested // size)
        label = f"batch_size {size}"
        if self.accumulates:
            label += f", accumulation {accumulation}"
        effective = size * (accumulation if self.accumulates else 1)
        hint = "" if self.accumulates else "; take accumulation as an argument to keep it"
        warning = f"the effective batch is {effective} instead of {self.requested}{hint}"
        return Setting(
            values=(size, accumulation) if self.accumulates else (size,),
            label=label,
            to_remember=(("batch_size", size),),
            warning="" if effective == self.requested else warning,
        )

    def _smaller(self, size: int) -> int:
        half = max(size // 2, min(self.smallest, size - 1))
        if not self.accumulates:
            return half
        divisors = (each for each in range(half, 0, -1) if self.requested % each == 0)
        divisor = next(divisors, 0)
        return divisor if divisor > half // 2 else half


def _size(setting: Setting) -> int:
    size = dict(setting.to_remember)["batch_size"]
    assert isinstance(size, int)
    return size
