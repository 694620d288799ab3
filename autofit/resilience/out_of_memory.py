"""Was it memory, how much is held, and how to give it back. Imports torch."""

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


class Witness:
    """What corroborates a suspect failure: the memory figures from before the call and after it.

    Made at the start of a call, so it must cost next to nothing.
    """

    __slots__ = ("_refused",)

    def __init__(self) -> None:
        """Note how many allocations had been refused before."""
        self._refused = _refused()

    def short(self) -> bool:
        """Return whether an allocation was refused meanwhile, or the device is nearly full."""
        return _refused() > self._refused or _full()


def diagnose(error: BaseException, witness: Witness) -> Diagnosis:
    """Return what a failure is; a suspect counts as an OOM where memory figures say so."""
    found = classify(error)
    if found.kind is Kind.SUSPECT and witness.short():
        return found.corroborated()
    return found


def held() -> int | None:
    """Return the bytes held by tensors on the current device; ``None`` where nobody counts."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.memory_allocated())
    shim = _shim()
    return None if shim is None else shim.current()


def give_back(error: BaseException | None = None) -> None:
    """Free what a failed call holds: its frames' variables, what only cycles hold, the cache.

    Call it outside the ``except`` block: inside, the interpreter itself holds the error.
    """
    if error is not None:
        forget(error)
    gc.collect()
    torch.clear_autocast_cache()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        gc.collect()  # what the kernels that have just ended kept alive
        torch.cuda.empty_cache()


def forget(error: BaseException) -> None:
    """Clear the local variables of every frame that ``error`` and what is behind it went through.

    The lines stay, so that the traceback can still be printed. Frames that run are left alone.
    """
    for each in _behind(error):
        traceback.clear_frames(each.__traceback__)


def shorten(error: BaseException) -> None:
    """Cut the tracebacks where they come to a closure; what is cut stays readable, as a note.

    A cleared frame still holds its function and, by that, what the function closes over: torch
    calls a module with hooks through one that holds the module and its inputs. Deeper frames hold
    the frames that called them.
    """
    for each in _behind(error):
        _cut(each)
    gc.collect()


def _cut(error: BaseException) -> None:
    before, entry = None, error.__traceback__
    while entry is not None and not entry.tb_frame.f_code.co_freevars:
        before, entry = entry, entry.tb_next
    if entry is None:
        return
    error.add_note("autofit: and from there on\n" + "".join(traceback.format_tb(entry)).rstrip())
    if before is None:
        error.__traceback__ = None
    else:
        before.tb_next = None


def _behind(error: BaseException) -> Iterator[BaseException]:
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
    """Return whether the device is nearly full now, or was while tensors peaked."""
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        return free < (1 - NEAR) * total
    return False
