"""The interface of every meter: the memory of one process on one device. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

CAP = "AUTOFIT_METER_CAP"
"""Environment variable with the child's cap in bytes; ``for_device`` reads it."""

NEAR = 0.95
"""If the peak exceeds this share of the cap, a suspect failure counts as an OOM."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak memory since the last ``reset``, in bytes."""

    allocated: int
    """Bytes that tensors held."""
    reserved: int
    """Bytes that torch's allocator held; never below ``allocated``."""
    device: int
    """Bytes that the process occupied on the device; never below ``reserved``."""

    def worst(self, other: Peak) -> Peak:
        """Return the larger value of each field."""
        return Peak(
            max(self.allocated, other.allocated),
            max(self.reserved, other.reserved),
            max(self.device, other.device),
        )


class Meter(Protocol):
    """Measures and caps the memory of its own process. Sizes are bytes.

    Call ``for_device`` before the script starts, ``arm`` once torch is imported, then ``reset``
    and ``peak`` around each measurement.
    """

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda"``."""

    @property
    def capacity(self) -> int | None:
        """The cap; ``None`` without one."""

    @property
    def context(self) -> int:
        """Device memory of the process outside torch's allocator (0 on the CPU)."""

    def note_others(self) -> None:
        """Read again what other processes hold; call it before the device is started."""

    def arm(self) -> None:
        """Apply the cap where that needs torch to be imported; a second call does nothing."""

    def set_cap(self, size: int | None) -> None:
        """Let the process occupy at most ``size`` bytes of the device; ``None`` lifts the cap."""

    def current(self) -> int:
        """Return the bytes that tensors hold now."""

    def peak(self) -> Peak:
        """Return the peak since the last ``reset``."""

    def sample(self) -> None:
        """Sample the memory for which no allocator records a peak; cheap, called between steps."""

    def reset(self) -> None:
        """Set the peak to the present use."""

    def available(self) -> int | None:
        """Return the bytes that the process occupies on the device plus the free bytes.

        ``None`` if no other process can use the device, or if the figure is unknown.
        """

    def release(self) -> None:
        """Give the allocator's unused memory back to the device."""

    def retries(self) -> int:
        """Return how often the allocator emptied its cache and tried again, since the start."""

    def refused(self) -> int:
        """Return how many allocations failed since the start."""

    def short(self) -> bool:
        """Return whether an allocation failed or the peak came near the cap since ``reset``.

        If so, a suspect of ``autofit.worker.oom.classifier`` counts as an OOM.
        """

    def synchronize(self) -> None:
        """Wait until the device has finished all work that was queued."""
