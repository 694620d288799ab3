"""Diagnoses a shortage of memory, and frees what a failed call holds. Imports torch."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from functools import cache

import torch

from autofit.worker.meter.base import NEAR
from autofit.worker.meter.cpu import ShimMeter
from autofit.worker.oom.classifier import Diagnosis, Kind, classify


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
    if found.kind is Kind.SUSPECT and watch.ran_short():
        return found.corroborated()
    return found


def tensor_bytes() -> int | None:
    """Return the bytes of all tensors on the current device; ``None`` if they are not counted."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.memory_allocated())
    shim = _shim()
    return None if shim is None else shim.current()


def free_memory(error: BaseException | None = None) -> None:
    """Free what a failed call holds: frames' variables, reference cycles, and the CUDA cache.

    Call it outside the ``except`` block: inside, the interpreter holds the error.
    """
    if error is not None:
        clear_frames(error)
    gc.collect()
    torch.clear_autocast_cache()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        gc.collect()  # kernels that ended only now may have kept objects alive
        torch.cuda.empty_cache()


def clear_frames(error: BaseException) -> None:
    """Clear the local variables of every frame in the tracebacks of ``error`` and its causes.

    The tracebacks can still be printed. Frames that are still running are not cleared.
    """
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)


def cut_tracebacks(error: BaseException) -> None:
    """Cut the tracebacks at the first frame of a closure, and add the rest to the error as a note.

    A cleared frame still holds the variables that its function closes over. ``nn.Module`` calls
    hooks through a closure over the module and its inputs. Deeper frames hold their callers, so
    they are cut too.
    """
    for each in _chain(error):
        _cut(each)
    gc.collect()


def _cut(error: BaseException) -> None:
    before, entry = None, error.__traceback__
    while entry is not None and not entry.tb_frame.f_code.co_freevars:
        before, entry = entry, entry.tb_next
    if entry is None:
        return
    error.add_note(
        "autofit: the traceback goes on\n" + "".join(traceback.format_tb(entry)).rstrip()
    )
    if before is None:
        error.__traceback__ = None
    else:
        before.tb_next = None


def _chain(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        group = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        behind = (each.__cause__, each.__context__, *group)
        waiting += [one for one in behind if one is not None]


def _refused() -> int:
    """Return how many allocations the device's allocator has refused so far."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.memory_stats_as_nested_dict().get("num_ooms", 0))
    shim = _shim()
    return 0 if shim is None else shim.refused()


def _full() -> bool:
    """Return whether the device is nearly full; always False on the CPU."""
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        return free < (1 - NEAR) * total
    return False
