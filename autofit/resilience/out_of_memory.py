"""Diagnoses a shortage of memory, and frees what a failed call holds. Imports torch."""

from __future__ import annotations

import gc
from functools import cache

import torch

from autofit.worker.meter import accelerator
from autofit.worker.meter.base import NEAR
from autofit.worker.meter.kinds.cpu import ShimMeter
from autofit.worker.oom.attempt import free_frames
from autofit.worker.oom.classifier import Diagnosis, ErrorKind, classify


@cache
def _shim() -> ShimMeter | None:
    return ShimMeter.loaded()


class AllocationWatch:
    """Tells whether memory ran short since it was made.

    Some errors only suggest a shortage, such as a cuDNN failure; this confirms them. Every call
    makes one, so it must be cheap.
    """

    __slots__ = ("_refused",)

    def __init__(self) -> None:
        """Note how many allocations have been refused so far."""
        self._refused = _refused()

    def ran_short(self) -> bool:
        """Return whether an allocation was refused since then, or the device is nearly full."""
        return _refused() > self._refused or _full()


def diagnose(error: BaseException, watch: AllocationWatch) -> Diagnosis:
    """Classify ``error``; a suspect counts as out of memory if ``watch`` confirms it."""
    found = classify(error)
    if found.kind is ErrorKind.SUSPECT and watch.ran_short():
        return found.corroborated()
    return found


def tensor_bytes() -> int | None:
    """Return the bytes of all tensors on the current device; ``None`` if they are not counted."""
    if accelerator.started():
        return accelerator.allocated()
    shim = _shim()
    return None if shim is None else shim.current()


def free_memory(error: BaseException | None = None) -> None:
    """Free what a failed call holds: frames' variables, reference cycles, and the CUDA cache.

    Call it outside the ``except`` block: inside, the interpreter holds the error.
    """
    if error is not None:
        free_frames(error)
    gc.collect()
    torch.clear_autocast_cache()
    if accelerator.started():
        accelerator.synchronize()
        gc.collect()  # kernels that ended only now may have kept objects alive
        accelerator.empty_cache()


def _refused() -> int:
    """Return how many allocations the device's allocator has refused so far."""
    if accelerator.started():
        return accelerator.refused()
    shim = _shim()
    return 0 if shim is None else shim.refused()


def _full() -> bool:
    """Return whether the device is nearly full; always False on the CPU."""
    if accelerator.started():
        free, total = accelerator.free_and_total()
        return free < (1 - NEAR) * total
    return False
