"""Calls a function before torch starts a device in this process. Imported after its torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autofit.worker import meter
from autofit.worker.harness.patching.patches import Patches
from autofit.worker.meter import accelerator


def before_device_starts(patches: Patches, wait: Callable[[], None]) -> None:
    """Call ``wait`` just before torch starts a device; do nothing in a torch for the CPU alone.

    Python code and torch's own (``torch/csrc/utils/device_lazy_init.cpp``) start, for instance,
    CUDA with its ``_lazy_init``. That calls ``torch._C._cuda_init``, once, and holds a lock
    meanwhile. Modules of torch have imported ``_lazy_init`` by name, so the inner function is
    replaced.
    """

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def init(*args: Any) -> Any:
            wait()
            return plain(*args)

        return init

    for name in (f"_{kind}_init" for kind in meter.KINDS):
        if hasattr(torch._C, name):
            patches.wrap(torch._C, name, make)


def holds_context() -> bool:
    """Return whether the process has a context of a device, for instance of pinned host memory.

    The driver is asked, which makes no context.
    """
    asked = (getattr(torch._C, f"_{kind}_hasPrimaryContext", None) for kind in meter.KINDS)
    return any(any(map(each, range(accelerator.devices()))) for each in asked if each is not None)
