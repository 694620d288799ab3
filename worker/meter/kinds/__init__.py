"""The kinds of device that autofit knows: one module each, with its ``KIND``."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from autofit.worker.meter.base import DeviceKind


def find() -> dict[str, DeviceKind]:
    """Return the kinds of all modules in this folder, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    kinds: list[DeviceKind] = [import_module(f"{__name__}.{name}").KIND for name in names]
    return {kind.name: kind for kind in kinds}
