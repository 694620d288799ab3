"""Measures how fast the ranks communicate, with collectives of the size that a training sends."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from autofit.facts import HOST, Bandwidth
from autofit.worker.harness.ranks.group import RankGroup
from autofit.worker.meter import Meter, accelerator
from autofit.worker.oom.attempt import attempt

MESSAGE = 64 << 20
"""Bytes of a message. Gradients are summed in messages of 32 MiB (``reduction.py``)."""
CPU_MESSAGE = 8 << 20
"""Bytes of a message between ranks that share the host's memory."""
LEAST = 4
"""A message may be smaller by this factor if memory is scarce; then nothing is measured."""
SHARE = 4
"""The free memory must be this many times a message. The buffers need 1.5 times at most."""
TIMES = 4
"""Messages that are timed, of each kind. One before them prepares the connections."""


def measure(group: RankGroup, meter: Meter) -> Bandwidth | None:
    """Return the bandwidth between the ranks of ``group``; ``None`` if memory is scarce.

    All ranks call it at the same time, and all get the same result: that of the slowest rank. The
    buffers are freed, and the peak of ``meter`` does not show them.
    """
    apart = meter.device != HOST
    started = not apart or accelerator.started()
    free = group.meet("the memory for a message", _free(meter) if started else 0)
    size = _size(MESSAGE if apart else CPU_MESSAGE, min(free), group.size)
    if not size:
        return None
    before = meter.peak()
    found = _measured(group, meter, size)
    meter.release()
    after = meter.peak()
    if after.allocated > before.allocated or after.reserved > before.reserved:
        meter.reset()
    return found


def _free(meter: Meter) -> int:
    """Return the bytes that this process can still allocate; 0 if the limit is unknown."""
    limits = [each for each in (meter.capacity, meter.available()) if each is not None]
    return min(limits) - meter.context - meter.current() if limits else 0


def _size(wanted: int, free: int, ranks: int) -> int:
    """Return the entries of a message, a multiple of ``ranks``; 0 if memory is scarce."""
    size = next((wanted // by for by in (1, 2, LEAST) if SHARE * (wanted // by) <= free), 0)
    return size // torch.float32.itemsize // ranks * ranks


def _measured(group: RankGroup, meter: Meter, size: int) -> Bandwidth | None:
    """Return what ``measure`` does, with messages of ``size`` entries."""
    buffers = _buffers(meter.device, size, group.size)
    if any(group.meet("the buffers of a message", buffers is None)):
        return None
    assert buffers is not None, "all ranks have theirs"
    whole, part = buffers
    gather = _named("all_gather_single", "all_gather_into_tensor")
    scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
    kinds: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, part),
        "reduce_scatter": lambda: scatter(part, whole),
    }
    own = []
    for kind, send in kinds.items():
        send()
        meter.synchronize()
        group.meet(f"the time of {kind}")
        start = time.perf_counter()
        for _ in range(TIMES):
            send()
        meter.synchronize()
        own.append((time.perf_counter() - start) / TIMES)
    sent = whole.nbytes * (group.size - 1) / group.size
    for buffer in buffers:  # a thread of gloo may hold the tensors a moment longer
        buffer.untyped_storage().resize_(0)
    said = group.meet("the times of all messages", own)
    summed, gathered, scattered = (max(each) for each in zip(*said, strict=True))
    return Bandwidth(
        all_reduce=2 * sent / summed,
        all_gather=sent / gathered,
        reduce_scatter=sent / scattered,
    )


def _named(name: str, before: str) -> Callable[..., object]:
    """Return a function of ``torch.distributed``; ``before``: its name up to torch 2.12."""
    found: Callable[..., object] = getattr(dist, name, None) or getattr(dist, before)
    return found


def _buffers(device: str, size: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return zeros for a whole message and for one rank's part; ``None`` if memory has run out."""

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.zeros(size, dtype=torch.float32, device=device)
        return whole, torch.zeros(size // ranks, dtype=torch.float32, device=device)

    return attempt(make, corroborated=lambda: True).value
