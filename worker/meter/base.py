"""What every kind of device and every meter offers. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autofit.facts import HOST, Hardware

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
        """``DeviceKind.name``."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CardHolder:
    """A process with memory on a card."""

    pid: int
    """The driver's number of the process; inside a container it may have another."""
    name: str
    """Name of its program; empty if unknown."""
    size: int | None
    """Bytes that it holds; ``None`` if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The state of a GPU, or of a MIG instance, at one moment."""

    entry: str
    """The value of ``DeviceKind.visible`` that shows a process this card alone."""
    uuid: str
    hardware: Hardware
    free: int
    """Free bytes."""
    held: int
    """Bytes that processes hold, including those that the driver does not name."""
    holders: tuple[CardHolder, ...]
    """The processes that the driver names; in a container there may be none."""
    mig: bool = False
    measured: bool = True
    """``False`` if the free memory is unknown; ``free`` is then the size of the card."""

    @property
    def label(self) -> str:
        """Name of the card in messages."""
        return f"GPU {self.entry}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much a card is used at one moment."""

    card: str
    """``Card.label``."""
    total: int
    """Bytes of the card."""
    held: int
    """Bytes that processes hold."""
    busy: int | None
    """Percent of the last moments in which a kernel ran; ``None`` for a MIG instance."""


class DeviceKind(ABC):
    """What autofit has to know of one kind of device. Imports no torch.

    A module in ``kinds`` holds all of it, and sets ``KIND``. What torch knows of every accelerator
    is read in ``accelerator.py``. Ray's name of it, and techniques of one kind, are elsewhere.
    """

    name: str
    """torch's name of the type, such as ``"cuda"``."""
    visible: str = ""
    """The environment variable that tells which devices a process may use, separated by commas."""
    backend: str = "gloo"
    """The backend of ``torch.distributed`` with which its tensors are communicated."""

    @property
    def on_host(self) -> bool:
        """Whether it is the CPU, whose memory is the host's."""
        return self.name == HOST

    def cards(self) -> tuple[Card, ...]:
        """Return the present state of the devices that are visible to this process."""
        return ()

    def loads(self) -> tuple[Load, ...]:
        """Return how much each device of this machine is used now, as far as its driver answers."""
        return ()

    def measured_cards(self, variables: Mapping[str, str]) -> tuple[Card, ...]:
        """Return the devices that are visible to a process with these environment variables.

        Their memory is measured. Raises ``WorkerError`` if the driver does not answer.
        """
        return ()

    def visible_only(self, entries: Sequence[str]) -> dict[str, str]:
        """Return the variable that shows a process only the cards with these entries."""
        return {self.visible: ",".join(entries)} if self.visible else {}

    @abstractmethod
    def hardware(self, index: int) -> Hardware:
        """Return name and size of a device; raise ``WorkerError`` if it does not exist."""

    @abstractmethod
    def free_bytes(self, index: int) -> int:
        """Return the free bytes of a device; raise ``WorkerError`` if it does not exist."""

    def require_cap(self) -> None:  # noqa: B027 - most kinds can always cap
        """Raise ``UsageError`` if the memory of a process cannot be capped."""

    def environment(self, cap: int | None, base: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that ``meter`` needs in the child, added to those in ``base``.

        ``cap``: the bytes that the child may occupy. Raises ``UsageError`` if that is impossible.
        """
        return {}

    @abstractmethod
    def meter(self, cap: int | None) -> Meter:
        """Return the meter of this process, in the child; ``cap``: the bytes it may occupy."""
