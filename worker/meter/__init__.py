"""Measures and caps the memory of one process on one device. Imports no torch.

The parent asks what there is (``hardware``, ``free_bytes``) and starts the child with
``environment``. The child calls ``for_device``, then ``forget``, then becomes the script.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from autofit import host
from autofit.exceptions import UsageError, WorkerError
from autofit.facts import Hardware
from autofit.worker.meter import build, libcuda, nvml
from autofit.worker.meter.base import CAP, Meter, Peak
from autofit.worker.meter.nvml import Card, Holder

__all__ = [
    "Card",
    "Hardware",
    "Holder",
    "Meter",
    "Peak",
    "cards",
    "default_device",
    "environment",
    "for_device",
    "forget",
    "free_bytes",
    "hardware",
    "require_cap",
]

DEVICES = ("cpu", "cuda")
LOCAL_RANK = "LOCAL_RANK"
"""Which of the cards it sees is a process's own, as ``torchrun`` says it."""
_SHIM_CAP = "AUTOFIT_SHIM_CAP"
NO_SHIM = (
    "a memory budget on the CPU needs Linux and a C compiler to count allocations;"
    " install gcc or clang, or use a GPU"
)
_BEFORE = "AUTOFIT_METER_BEFORE"
"""JSON of what our variables were before: the way back for ``forget``."""


def default_device() -> str:
    """Return ``"cuda"`` where the driver shows a GPU, else ``"cpu"``."""
    return "cuda" if cards() else "cpu"


def cards() -> tuple[Card, ...]:
    """Return the GPUs that CUDA shows this process, as they are; none where there are none."""
    try:
        return nvml.cards()
    except WorkerError:
        return libcuda.cards()


def hardware(device: str, index: int = 0) -> Hardware:
    """Return what the device is: its name and bytes; raise ``WorkerError`` when it is not there."""
    return _card(index).hardware if _known(device) == "cuda" else host.hardware()


def free_bytes(device: str, index: int = 0) -> int:
    """Return the bytes nobody holds on the device."""
    return _card(index).free if _known(device) == "cuda" else host.free_bytes()


def _card(index: int) -> Card:
    found = cards()
    if index >= len(found):
        raise WorkerError(f"no GPU {index}: {len(found)} are visible here; ask for fewer")
    return found[index]


def environment(
    device: str, cap: int | None, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return what a child needs in its environment to be counted, and capped at ``cap`` bytes.

    ``base`` is the environment they will be added to (``os.environ`` when not given). On the CPU
    the first call on a machine compiles the shim (about a second). Raises ``UsageError`` for a cap
    on the CPU where the shim cannot be compiled.
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
    """Raise ``UsageError`` where no process on ``device`` can be held to a cap."""
    if _known(device) == "cpu" and build.shim() is None:
        raise UsageError(NO_SHIM)


def forget() -> None:
    """Put ``os.environ`` back to what it was without ``environment``.

    The meter of this process stays; loader workers and subprocesses inherit nothing of it.
    """
    before: dict[str, str | None] = json.loads(os.environ.pop(_BEFORE, "{}"))
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def for_device(device: str) -> Meter:
    """Return the meter of this process; call it in the child, before ``forget``."""
    cap = int(os.environ.get(CAP, "0")) or None
    if _known(device) == "cuda":
        from autofit.worker.meter.cuda import CudaMeter

        local = os.environ.get(LOCAL_RANK, "")  # some set it to -1 where there is one process
        return CudaMeter(cap, int(local) if local.isdecimal() else None)
    from autofit.worker.meter.cpu import ResidentMeter, ShimMeter

    return ShimMeter.loaded() or ResidentMeter()


def _known(device: str) -> str:
    """Return ``device``; raise ``UsageError`` when there is no meter for it."""
    if device not in DEVICES:
        raise UsageError(f"no such device: {device!r}; there are {' and '.join(DEVICES)}")
    return device
