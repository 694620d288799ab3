"""The CPU, which stands in for a GPU with real limits and OOMs. Imports no torch.

``ShimMeter`` counts and caps exact bytes. ``ResidentMeter`` measures a process without a cap.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

from autofit import host
from autofit.exceptions import UsageError
from autofit.facts import HOST, Hardware
from autofit.worker.meter import build
from autofit.worker.meter.base import NEAR, DeviceKind, Meter, Peak

NO_SHIM = (
    "a memory budget on the CPU needs Linux and a C compiler to count allocations;"
    " install gcc or clang, or use a GPU"
)
_SHIM_CAP = "AUTOFIT_SHIM_CAP"

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc_pid_clear_refs(5): "reset the peak resident set size"


class Cpu(DeviceKind):
    """The processors and the memory of this machine, as one device."""

    name = HOST

    def hardware(self, index: int) -> Hardware:
        """Return the CPU's model and the memory that this process may use."""
        return host.hardware()

    def free_bytes(self, index: int) -> int:
        """Return the bytes that a new process could allocate without swapping."""
        return host.free_bytes()

    def require_cap(self) -> None:
        """Raise ``UsageError`` if the shim cannot be compiled."""
        if build.shim() is None:
            raise UsageError(NO_SHIM)

    def environment(self, cap: int | None, base: Mapping[str, str]) -> dict[str, str]:
        """Preload the shim; the first call on a machine compiles it, which takes about a second."""
        if cap is not None:
            self.require_cap()
        if (shim := build.shim()) is None:
            return {}
        preload = base.get("LD_PRELOAD", "")
        return {
            "LD_PRELOAD": f"{shim}:{preload}" if preload else str(shim),
            _SHIM_CAP: str(cap or 0),
        }

    def meter(self, cap: int | None) -> Meter:
        """Return the meter that reads the shim, or the resident memory without one."""
        return ShimMeter.loaded() or ResidentMeter()


KIND = Cpu()


class ShimMeter:
    """Reads from the preloaded shim (``shim.c``) exactly how many bytes libc10 has allocated.

    These are all the bytes that count, so the three fields of a peak are equal.
    """

    device = HOST
    context = 0

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("allocated", "peak", "cap", "refused", "last_refused"):
            getattr(library, f"autofit_shim_{name}").restype = ctypes.c_uint64
        library.autofit_shim_set_cap.argtypes = (ctypes.c_uint64,)
        library.autofit_shim_set_cap.restype = None
        library.autofit_shim_reset_peak.restype = None
        self._refused_before = self.refused()

    @classmethod
    def loaded(cls) -> ShimMeter | None:
        """Return a meter that reads the shim of this process; ``None`` if none is preloaded."""
        try:
            return cls(ctypes.CDLL(None))
        except AttributeError:  # no such symbol
            return None

    def _read(self, name: str) -> int:
        return int(getattr(self._library, f"autofit_shim_{name}")())

    @property
    def capacity(self) -> int | None:
        """The cap; ``None`` without one."""
        return self._read("cap") or None

    def note_others(self) -> None:
        """Do nothing: no other process uses this stand-in device."""

    def arm(self) -> None:
        """Do nothing: the shim applies its cap from the first allocation on."""

    def set_cap(self, size: int | None) -> None:
        """Refuse allocations of libc10 above ``size`` bytes in all; ``None`` lifts the cap."""
        self._library.autofit_shim_set_cap(size or 0)

    def current(self) -> int:
        """Return the bytes that tensors hold now."""
        return self._read("allocated")

    def peak(self) -> Peak:
        """Return the peak since the last ``reset``."""
        peak = self._read("peak")
        return Peak(peak, peak, peak)

    def reset(self) -> None:
        """Set the peak to the present use."""
        self._library.autofit_shim_reset_peak()
        self._refused_before = self.refused()

    def sample(self) -> None:
        """Do nothing: the peak is recorded anyway."""

    def available(self) -> int | None:
        """Return ``None``: no other process uses this stand-in device."""
        return None

    def release(self) -> None:
        """Do nothing: the allocator has no cache."""

    def retries(self) -> int:
        """Return 0: there is no cache to empty."""
        return 0

    def refused(self) -> int:
        """Return how many allocations the cap refused."""
        return self._read("refused")

    def last_refused(self) -> int | None:
        """Return the bytes of the allocation refused last; ``None`` if there was none."""
        return self._read("last_refused") or None

    def short(self) -> bool:
        """Return whether an allocation was refused, or the peak came near the cap."""
        limit = self.capacity
        near = limit is not None and self.peak().allocated > NEAR * limit
        return near or self.refused() > self._refused_before

    def synchronize(self) -> None:
        """Do nothing: the CPU has no queue."""


class ResidentMeter:
    """Reads the memory of a process that was started without the shim; it has no cap.

    It serves runs without a budget. It counts all resident memory, including Python's and the
    libraries', less what the process held when ``arm`` was called.
    """

    device = HOST
    context = 0
    capacity = None

    def __init__(self) -> None:
        self._armed = False
        self._before = 0

    def note_others(self) -> None:
        """Do nothing: no other process uses this stand-in device."""

    def arm(self) -> None:
        """Count memory from the present use on."""
        if not self._armed:
            self._armed = True
            self._before = _status("VmRSS")
            self.reset()

    def set_cap(self, size: int | None) -> None:
        """Do nothing: without the shim, no allocation can be refused."""

    def current(self) -> int:
        """Return the resident bytes above those at the time of ``arm``."""
        return max(0, _status("VmRSS") - self._before)

    def peak(self) -> Peak:
        """Return the peak since the last ``reset``."""
        peak = max(0, _status("VmHWM") - self._before)
        return Peak(peak, peak, peak)

    def reset(self) -> None:
        """Set the peak to the present use."""
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")

    def sample(self) -> None:
        """Do nothing: the peak is recorded anyway."""

    def available(self) -> int | None:
        """Return ``None``: no other process uses this stand-in device."""
        return None

    def release(self) -> None:
        """Do nothing: the allocator has no cache."""

    def retries(self) -> int:
        """Return 0: there is no cache to empty."""
        return 0

    def refused(self) -> int:
        """Return 0: no allocation is refused."""
        return 0

    def short(self) -> bool:
        """Return ``False``: without a cap, memory does not run short."""
        return False

    def synchronize(self) -> None:
        """Do nothing: the CPU has no queue."""


def _status(field: str) -> int:
    """Return the bytes of one line of ``/proc/self/status``; 0 if there is no such line."""
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
