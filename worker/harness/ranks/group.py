"""The ranks of a single-process script: connected for autofit, invisible to the script.

Before ranks communicate, all of them *meet*: each says what it is about to do. If they say
different things, all of them end at once with the reason. Otherwise one would wait for a message
that the others never send. A rank whose process has ended is noticed at once. Meetings use gloo on
the CPU; tensors on a GPU travel by NCCL.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from autofit.exceptions import Refused, WorkerError
from autofit.strategies import RANKS, SHARDING
from autofit.strategies.base import Shards
from autofit.worker import meter
from autofit.worker.meter import accelerator
from autofit.worker.records.trials import LOOPBACK, Meeting

PATIENCE = timedelta(seconds=300)
"""How long a rank waits for one that is neither at another meeting nor gone.

Rank 0 may be saving a checkpoint to a slow disk.
"""
OWN_GROUP = "the script sets up torch.distributed itself"
TRUTHFUL = ("torch.distributed.", "torch.nn.parallel.", "autofit.worker.harness.ranks.")
"""Prefixes of the modules that see the group; all others see a process that is alone."""
_ALONE: dict[str, Any] = {"is_initialized": False, "get_rank": 0, "get_world_size": 1}
_SHORT = 1000
"""Bytes that a message of a meeting usually needs; a longer one takes a second exchange."""
_GLOO = "gloo"
_INTERFACE = "GLOO_SOCKET_IFNAME"


class Diverged(WorkerError):
    """The ranks do not do the same."""


class RankGone(WorkerError):
    """Another rank has ended, or does not answer."""


@dataclass(frozen=True, slots=True)
class Said:
    """What one rank says at a meeting."""

    number: int
    """How many meetings there were before."""
    what: str
    """What the rank is about to do."""
    value: Any


class RankGroup:
    """The ranks of one training, as seen by one of them."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.over = False
        """A meeting has failed; there will be no other."""
        self._met = 0

    @classmethod
    def connect(cls, rank: int, size: int, meeting: Meeting, device: str) -> RankGroup:
        """Connect to the other ranks, and hide that from the script."""
        where = meeting.address, meeting.port
        store = dist.TCPStore(*where, size, is_master=rank == 0)  # type: ignore[attr-defined]
        _connect(rank, size, store, device, meeting.address)
        return cls(rank, size)

    @classmethod
    def of_one(cls, device: str) -> RankGroup:
        """Return the group of this process alone, which torch needs to shard weights."""
        if not _of_one:
            _connect(0, 1, dist.HashStore(), device)  # type: ignore[attr-defined]
            _of_one.append(cls(0, 1))
        return _of_one[0]

    # --- meetings --------------------------------------------------------------------------

    def meet(self, what: str, value: Any = None) -> list[Any]:
        """Return what each rank brings, by rank, once all are about to do ``what``.

        Raises ``Diverged`` if another rank is about to do something else, and ``RankGone`` if it
        has ended. Values are pickled.
        """
        if self.over:
            raise RankGone(f"no rank meets any more, and this one is at {what}")
        said = self._exchange(Said(self._met, what, value))
        self._met += 1
        if len({(each.number, each.what) for each in said}) > 1:
            self.over = True
            where = ", ".join(f"rank {rank} is at {each.what}" for rank, each in enumerate(said))
            raise Diverged(
                f"the ranks do not do the same: {where}; "
                "seed all random generators of the script, or run it on one GPU"
            )
        return [each.value for each in said]

    def _exchange(self, said: Said) -> list[Said]:
        message = pickle.dumps(said)
        try:
            rows = self._messages(message, _SHORT)
            longest = max(size for size, _ in rows)
            if longest > _SHORT:
                rows = self._messages(message, longest)
        except RuntimeError as error:
            self.over = True
            line = str(error).partition("\n")[0]
            raise RankGone(f"another rank has ended or hangs, at {said.what}: {line}") from error
        return [pickle.loads(text) for _, text in rows]

    def _messages(self, message: bytes, length: int) -> list[tuple[int, bytes]]:
        own = torch.zeros(8 + length, dtype=torch.uint8)
        head = len(message).to_bytes(8, "little") + message[:length]
        own[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own)
        texts = [bytes(row.numpy()) for row in rows]
        sizes = [int.from_bytes(text[:8], "little") for text in texts]
        return [(size, text[8 : 8 + size]) for size, text in zip(sizes, texts, strict=True)]

    # --- tensors ---------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Replace the contiguous ``tensor`` by that of the rank ``source``, in place."""
        dist.broadcast(_bytes_of_flags(tensor), src=source)

    def gather_into(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Fill ``whole`` with the equal parts of all ranks; ``own``: this rank's part of it."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(whole, own)

    def channel(self) -> Any:
        """Return a connection in addition to the first; all ranks must ask for it.

        Messages in one channel do not wait for those in another.
        """
        return dist.new_group()

    def start_sum(self, tensor: torch.Tensor, channel: Any = None) -> Any:
        """Start to replace the contiguous ``tensor`` by the sum over all ranks, in place.

        The ``wait`` of the result lets what the device computes next see the sum.
        """
        return dist.all_reduce(tensor, group=channel, async_op=True)

    def gather(self, own: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
        """Return each rank's tensor; ``shapes`` has the shape of each, and the types are equal."""
        own = own.contiguous()
        found = [own.new_empty(shape) for shape in shapes]
        if len(set(shapes)) == 1:
            dist.all_gather([_bytes_of_flags(each) for each in found], _bytes_of_flags(own))
            return found
        found[self.rank] = own
        for rank, each in enumerate(found):
            if each.numel():
                dist.broadcast(_bytes_of_flags(each), src=rank)
        return found


def _bytes_of_flags(tensor: torch.Tensor) -> torch.Tensor:
    """Return booleans as bytes, which every backend can send; other tensors as they are."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


LAST_TENSORS = 0.05
"""Seconds at the end in which gloo's threads can free the tensors of the last messages.

They need the interpreter for it. If it ends first, they abort the process: 1 of 10 that ended just
after a meeting.
"""
connected = False
"""Whether this process was connected to others, or to itself alone."""
_of_one: list[RankGroup] = []
"""The group of this process alone, once it exists."""


def sharing(group: RankGroup | None, shards: Shards) -> RankGroup:
    """Return the ranks that share the weights: ``group``, or this process alone."""
    if group is not None:
        return group
    if not shards.on_host:
        raise Refused("there is only one process, so the weights cannot be sharded")
    if not _of_one and dist.is_initialized():
        raise Refused(OWN_GROUP, SHARDING)
    return RankGroup.of_one(accelerator.device())


def _connect(rank: int, size: int, store: Any, device: str, address: str = LOOPBACK) -> None:
    """Connect to the other ranks, and hide that from the script; rank 0's host has ``address``."""
    global connected
    backend = _GLOO
    if (of_device := meter.kind(device).backend) != _GLOO:
        backend = f"cpu:{_GLOO},{device}:{of_device}"
    hook = sys.excepthook  # torch's would print the rank before each line of a traceback
    with _towards(address):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    sys.excepthook = hook
    connected = True
    atexit.register(_close, device, os.getpid())
    _hide()


@contextmanager
def _towards(address: str) -> Iterator[None]:
    """Let gloo use the interface that leads to ``address``, unless the user has named another.

    By default gloo uses the address of the host's name, which is often a loopback address.
    """
    before = os.environ.get(_INTERFACE)
    if before is None and (found := interface(address)):
        os.environ[_INTERFACE] = found
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_INTERFACE, None)


def interface(address: str) -> str | None:
    """Return the name of the network interface that leads to ``address``, if it is known."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # this sends nothing
        own = probe.getsockname()[0]
    for name, found in psutil.net_if_addrs().items():
        if any(each.address == own for each in found):
            return str(name)
    return "lo" if own.startswith("127.") else None


def _close(device: str, process: int) -> None:
    """Disconnect at the end of the process; without it, gloo's threads may abort the process.

    NCCL would wait for the other ranks, so its connections are aborted.
    """
    if os.getpid() != process:  # a forked child of the script
        return
    time.sleep(LAST_TENSORS)
    with suppress(Exception):
        if meter.kind(device).backend != _GLOO:
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()


def _hide() -> None:
    """Answer the script's questions about ``torch.distributed`` as in a single process."""
    for name, answer in _ALONE.items():
        setattr(dist, name, _hidden(getattr(dist, name), answer))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise Refused(OWN_GROUP, RANKS)

    dist.init_process_group = refuse


def _hidden(plain: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        asker = f"{sys._getframe(1).f_globals.get('__name__', '')}."
        return plain(*args, **kwargs) if asker.startswith(TRUTHFUL) else answer

    return ask
