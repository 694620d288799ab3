"""Measures and caps the memory of one process on one device. Imports no torch.

The parent calls ``hardware`` and ``free_bytes``, and starts the child with ``environment``. The
child calls ``for_device``, then ``forget``, then runs the script.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping

from autofit import host
from autofit.exceptions import UsageError, WorkerError
from autofit.facts import Hardware
from autofit.worker.meter import build, libcuda, nvml
from autofit.worker.meter.base import CAP, Meter, Peak
from autofit.worker.meter.nvml import VISIBLE, Card, Holder, driver_version, visible

__all__ = [
    "VISIBLE",
    "Card",
    "Hardware",
    "Holder",
    "Meter",
    "Peak",
    "cards",
    "default_device",
    "driver_version",
    "environment",
    "for_device",
    "forget",
    "free_bytes",
    "hardware",
    "measured_cards",
    "require_cap",
    "visible",
]

DEVICES = ("cpu", "cuda")
LOCAL_RANK = "LOCAL_RANK"
"""The variable with which ``torchrun`` assigns a process one of the visible cards."""
_SHIM_CAP = "AUTOFIT_SHIM_CAP"
NO_SHIM = (
    "a memory budget on the CPU needs Linux and a C compiler to count allocations;"
    " install gcc or clang, or use a GPU"
)
_BEFORE = "AUTOFIT_METER_BEFORE"
"""Holds the earlier values of the meter's variables as JSON; ``forget`` restores them."""


def default_device() -> str:
    """Return ``"cuda"`` if the driver reports a GPU, else ``"cpu"``."""
    return "cuda" if cards() else "cpu"


def cards() -> tuple[Card, ...]:
    """Return the present state of the GPUs that are visible to this process, or an empty tuple."""
    try:
        return nvml.cards()
    except WorkerError:
        return libcuda.cards()


def measured_cards(variables: Mapping[str, str]) -> tuple[Card, ...]:
    """Return the GPUs that are visible to a process with these environment variables.

    Their memory is measured. Raises ``WorkerError`` if the driver does not answer.
    """
    return nvml.cards(variables)


def hardware(device: str, index: int = 0) -> Hardware:
    """Return name and size of the device; raise ``WorkerError`` if it does not exist."""
    return _card(index).hardware if _known(device) == "cuda" else host.hardware()


def free_bytes(device: str, index: int = 0) -> int:
    """Return the free bytes of the device."""
    return _card(index).free if _known(device) == "cuda" else host.free_bytes()


def _card(index: int) -> Card:
    found = cards()
    if index >= len(found):
        raise WorkerError(f"no GPU {index}: {len(found)} are visible here; ask for fewer")
    return found[index]


def environment(
    device: str, cap: int | None, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables with which a child's memory is measured and capped at ``cap`` bytes.

    ``base``: the environment to which the caller adds them (default ``os.environ``). On the CPU,
    the first call on a machine compiles the shim, which takes about a second.
    Raises ``UsageError`` for a cap on the CPU if the shim cannot be compiled.
    """
    base = os.environ if base is None else base
    ours = {CAP: str(cap or 0)}
    if _known(device) == "cpu":
        shim = build.shim()
        if shim is not None:
            preload = base.get("LD_PRELOAD", "")
            ours["LD_PRELOAD"] = f"{shim}:{preload}" if preload else str(shim)
            ours[_SHIM_CAP] = str(cap or 0)
        elif cap is not None:
            raise UsageError(NO_SHIM)
    ours[_BEFORE] = json.dumps({name: base.get(name) for name in ours})
    return ours


def require_cap(device: str) -> None:
    """Raise ``UsageError`` if a cap on ``device`` is not possible."""
    if _known(device) == "cpu" and build.shim() is None:
        raise UsageError(NO_SHIM)


def forget(variables: MutableMapping[str, str] = os.environ) -> None:
    """Remove the variables of ``environment`` from ``variables`` and restore earlier values.

    The meter of this process keeps working. Data loader workers and subprocesses inherit none of
    the variables.
    """
    before: dict[str, str | None] = json.loads(variables.pop(_BEFORE, "{}"))
    for name, value in before.items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = value


def for_device(device: str) -> Meter:
    """Return the meter of this process; call it in the child, before ``forget``."""
    cap = int(os.environ.get(CAP, "0")) or None
    if _known(device) == "cuda":
        from autofit.worker.meter.cuda import CudaMeter

        local = os.environ.get(LOCAL_RANK, "")  # some launchers set -1 for a single process
        return CudaMeter(cap, int(local) if local.isdecimal() else None)
    from autofit.worker.meter.cpu import ResidentMeter, ShimMeter

    return ShimMeter.loaded() or ResidentMeter()


def _known(device: str) -> str:
    """Return ``device``; raise ``UsageError`` if there is no meter for it."""
    if device not in DEVICES:
        raise UsageError(f"no such device: {device!r}; there are {' and '.join(DEVICES)}")
    return device
