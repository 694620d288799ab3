"""Measures and caps the memory of one process on one device. Imports no torch.

The parent calls ``hardware`` and ``free_bytes``, and starts the child with ``environment``. The
child calls ``for_device``, then ``forget``, then runs the script. What is measured differently
on each kind of device is in the folder ``kinds``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping

from autofit.exceptions import UsageError
from autofit.facts import HOST, Hardware
from autofit.worker.meter.base import CAP, Card, CardHolder, DeviceKind, Load, Meter, Peak
from autofit.worker.meter.kinds import find
from autofit.worker.meter.nvml import driver_version

__all__ = [
    "KINDS",
    "ON_RAY",
    "VISIBLE",
    "Card",
    "CardHolder",
    "DeviceKind",
    "Hardware",
    "Load",
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
    "kind",
    "loads",
    "require_cap",
]

KINDS = find()
ON_RAY = "cuda"
"""The kind that Ray counts as GPUs."""
VISIBLE = tuple(each.visible for each in KINDS.values() if each.visible)
"""The environment variables that tell which devices a process may use."""
_BEFORE = "AUTOFIT_METER_BEFORE"
"""Holds the earlier values of the meter's variables as JSON; ``forget`` restores them."""


def kind(device: str) -> DeviceKind:
    """Return the kind of device with this name; raise ``UsageError`` if autofit knows none."""
    if device not in KINDS:
        raise UsageError(f"there is no device {device!r}: write {' or '.join(KINDS)}")
    return KINDS[device]


def default_device() -> str:
    """Return the first kind of which a device is visible, such as ``"cuda"``, or ``"cpu"``."""
    return next((name for name, each in KINDS.items() if each.cards()), HOST)


def cards() -> tuple[Card, ...]:
    """Return the visible devices of the default kind, or an empty tuple if it is the CPU."""
    return next((found for each in KINDS.values() if (found := each.cards())), ())


def loads() -> tuple[Load, ...]:
    """Return how much each device of this machine is used now, of all kinds."""
    return tuple(load for each in KINDS.values() for load in each.loads())


def hardware(device: str, index: int = 0) -> Hardware:
    """Return name and size of the device; raise ``WorkerError`` if it does not exist."""
    return kind(device).hardware(index)


def free_bytes(device: str, index: int = 0) -> int:
    """Return the free bytes of the device; raise ``WorkerError`` if it does not exist."""
    return kind(device).free_bytes(index)


def environment(
    device: str, cap: int | None, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables with which a child's memory is measured and capped at ``cap`` bytes.

    ``base``: the environment to which the caller adds them (default ``os.environ``).
    Raises ``UsageError`` if the device cannot be capped.
    """
    base = os.environ if base is None else base
    ours = {CAP: str(cap or 0), **kind(device).environment(cap, base)}
    ours[_BEFORE] = json.dumps({name: base.get(name) for name in ours})
    return ours


def require_cap(device: str) -> None:
    """Raise ``UsageError`` if a cap on ``device`` is not possible."""
    kind(device).require_cap()


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
    return kind(device).meter(int(os.environ.get(CAP, "0")) or None)
