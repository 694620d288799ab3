"""What every meter promises: the memory of one process on one device. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

CAP = "AUTOFIT_METER_CAP"
"""Environment variable with the cap of the child, in bytes; read by ``for_device``."""

NEAR = 0.95
"""A peak above this share of the cap makes a suspect failure one of memory."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The worst moment since the last ``reset``, in bytes."""

    allocated: int
    """Held by tensors."""
    reserved: int
    """Held by torch's allocator; never below ``allocated``."""
    device: int
    """Occupied on the device by the whole process; never below ``reserved``."""

    def worst(self, other: Peak) -> Peak:
        """Return the larger of each."""
        return Peak(
            max(self.allocated, other.allocated),
            max(self.reserved, other.reserved),
            max(self.device, other.device),
        )


class Meter(Protocol):
    """Reads and caps the memory of the process it lives in. Sizes are bytes.

    The order of use: ``for_device`` before the script starts, ``arm`` once torch is imported, then
    ``reset`` and ``peak`` around what is measured.
    """

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda"``."""

    @property
    def capacity(self) -> int | None:
        """The cap; ``None`` when there is none."""

    @property
    def context(self) -> int:
        """Device memory of the process outside torch's allocator (0 on the CPU)."""

    def arm(self) -> None:
        """Make the cap hold, as far as that had to wait for torch; a second call does nothing."""

    def set_cap(self, size: int | None) -> None:
        """Let the process occupy at most ``size`` bytes of the device; ``None`` lifts the cap."""

    def current(self) -> int:
        """Return the bytes held by tensors now."""

    def peak(self) -> Peak:
        """Return the worst moment since the last ``reset``."""

    def sample(self) -> None:
        """Look at what no allocator remembers the peak of; cheap, called between steps."""

    def reset(self) -> None:
        """Let the peak start again from what is held now."""

    def available(self) -> int | None:
        """Return the bytes the process occupies on the device and those that nobody does.

        ``None`` where nobody else can take them, or nobody knows.
        """

    def release(self) -> None:
        """Give the allocator's unused memory back to the device."""

    def retries(self) -> int:
        """Return how often the allocator had to empty its cache to go on, since the start."""

    def refused(self) -> int:
        """Return how many allocations failed, since the start."""

    def short(self) -> bool:
        """Return whether memory ran short since the last ``reset``.

        An allocation was refused, or the peak came near the cap: what makes a suspect of
        ``autofit.worker.oom.classifier`` an OOM.
        """

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it."""
