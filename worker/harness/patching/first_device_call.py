"""Calls a function before torch starts CUDA in this process. Imported after the script's torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autofit.worker.harness.patching.patches import Patches
from autofit.worker.meter import accelerator


def before_cuda_starts(patches: Patches, wait: Callable[[], None]) -> None:
    """Call ``wait`` just before torch starts CUDA; do nothing in a torch without CUDA.

    Python code and torch's own (``torch/csrc/utils/device_lazy_init.cpp``) start CUDA with
    its ``_lazy_init``. That calls ``torch._C._cuda_init``, once, and holds a lock meanwhile.
    Modules of torch have imported ``_lazy_init`` by name, so the inner function is replaced.
    """

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def cuda_init(*args: Any) -> Any:
            wait()
            return plain(*args)

        return cuda_init

    if hasattr(torch._C, "_cuda_init"):
        patches.wrap(torch._C, "_cuda_init", make)


def holds_context() -> bool:
    """Return whether the process has a CUDA context, for instance because it pinned host memory.

    The driver is asked, which makes no context.
    """
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return has_context is not None and any(map(has_context, range(accelerator.devices())))
