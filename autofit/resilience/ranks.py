"""All ranks agree on the next setting before any of them retries. Imports torch.

Ranks communicate through the store of ``torch.distributed``, which works while a collective is
stuck. A rank that runs out of memory writes this to the store, frees its memory, and leaves the
process group.

With gloo, that frees the other ranks: their collectives fail when a peer closes its connections.
With NCCL, a thread on each rank reads the store and aborts the communicators.

When every rank has reported its outcome and can start over, the first rank chooses the next
setting. The ranks then make a new process group from the same store.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import distributed, nn

from autofit.worker.meter import accelerator

PATIENCE = 60.0
"""Seconds that a rank whose attempt failed waits for the other ranks."""

FINISHED_PATIENCE = 600.0
"""Seconds that a rank whose attempt succeeded waits for the other ranks."""

SUCCEEDED, OUT_OF_MEMORY, PEER_FAILED, FAILED = (
    "succeeded",
    "out of memory",
    "peer failed",
    "failed",
)
"""The outcome of an attempt on one rank. ``PEER_FAILED``: only because another rank failed."""

_PEER_FAILED = re.compile(
    r"connection (?:closed|reset|refused)|broken pipe|\bgloo\b|\bnccl|process group|"
    r"communicator|timed out|timeout|aborted",
    re.IGNORECASE,
)
_SHARDED = {"FSDPModule", "FullyShardedDataParallel"}
_calls = count()


def in_use() -> bool:
    """Return whether there is more than one rank."""
    ready = distributed.is_available() and distributed.is_initialized()
    return ready and distributed.get_world_size() > 1


def communicates(module: nn.Module) -> bool:
    """Return whether the forward of this module, without its children, runs collectives."""
    if isinstance(module, nn.SyncBatchNorm):
        return module.training
    if not _SHARDED.isdisjoint(each.__name__ for each in type(module).__mro__):
        return True  # FSDP gathers its parameters in forward and backward
    spread = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return any(isinstance(each, spread) for each in module._parameters.values())


class CallRanks:
    """The ranks in one call of a decorated function; all ranks make the same calls in order."""

    def __init__(self) -> None:
        home = distributed.distributed_c10d
        group = home._get_default_group()
        self._rank, self._size = distributed.get_rank(), distributed.get_world_size()
        self._base = home._get_default_store()
        self._store = distributed.distributed_c10d.PrefixStore(
            f"autofit/{next(_calls)}", self._base
        )
        self._backend = str(distributed.get_backend_config(group))
        self._timeout: timedelta = home.default_pg_timeout
        self._device = getattr(group, "bound_device_id", None)
        self._attempt = 0
        self._aborted = False
        """The watcher has aborted the process group, so any error may come from that."""
        if "nccl" in self._backend and self._device is None:
            self._connect()

    def _connect(self) -> None:
        """Make NCCL's communicator before the function does.

        NCCL cannot free a rank that waits for others to join a communicator. If two ranks report
        the same GPU, the function has not chosen its GPU yet, and no communicator is made.
        """
        device = torch.device(accelerator.device(), torch.accelerator.current_device_index())
        self._store.set(f"gpu/{self._rank}", accelerator.uuid())
        keys = [f"gpu/{rank}" for rank in range(self._size)]
        self._store.wait(keys, timedelta(seconds=FINISHED_PATIENCE))
        if len({self._store.get(key) for key in keys}) == self._size:
            self._device = device
            distributed.all_reduce(torch.zeros(1, device=device))

    def is_peer_failure(self, error: BaseException) -> bool:
        """Return whether ``error`` is only the consequence of another rank's failure."""
        known = isinstance(error, (RuntimeError, OSError)) and bool(_PEER_FAILED.search(str(error)))
        return known or self._aborted

    @property
    def first(self) -> bool:
        """Whether this is the first rank, which chooses the settings."""
        return self._rank == 0

    def agree_on_start(self, remembered: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return what the first rank remembers; every rank starts with that setting."""
        if self.first:
            self._store.set("start", json.dumps(remembered))
            return remembered
        self._await(["start"], PATIENCE)
        found: Mapping[str, Any] | None = json.loads(self._store.get("start"))
        return found

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Return a context that frees this rank from a stuck collective when another rank fails."""
        if "nccl" not in self._backend:
            yield
            return
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(over,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join(PATIENCE)

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(0.5):
            if self._await([self._key("failed")], 0.0):
                self._aborted = True
                _release_defaults()
                distributed.distributed_c10d._abort_process_group()
                return

    def report(self, how: str) -> None:
        """Report the outcome of this rank's attempt to the other ranks, without waiting."""
        with suppress(distributed.DistNetworkError):  # the rank that hosts the store has ended
            if how != SUCCEEDED:
                self._store.set(self._key("failed"), how)
            self._store.set(self._key(f"ended/{self._rank}"), how)

    def outcomes(self, seconds: float) -> list[str] | None:
        """Return the outcome on each rank; ``None`` if one does not report within ``seconds``."""
        keys = [self._key(f"ended/{rank}") for rank in range(self._size)]
        if not self._await(keys, seconds):
            return None
        return [self._store.get(key).decode() for key in keys]

    def leave(self) -> None:
        """Leave the process group, so that no other rank waits for this one."""
        _release_defaults()
        if not distributed.is_initialized():
            pass  # the watcher has aborted it
        elif "nccl" in self._backend:
            distributed.distributed_c10d._abort_process_group()
        else:
            distributed.destroy_process_group()
        _release_meshes()
        gc.collect()  # gloo closes its connections when the last reference is dropped

    def agree(self, objection: str, setting: Mapping[str, Any] | None) -> tuple[str, Any]:
        """Return the first objection of any rank, and the next setting that the first rank chose.

        The objection is empty if no rank has one. ``setting`` is ``None`` if none is left. Raises
        ``TimeoutError`` if a rank does not answer.
        """
        if self.first:
            self._store.set(self._key("next"), json.dumps(setting))
        self._store.set(self._key(f"ready/{self._rank}"), objection)
        keys = [self._key(f"ready/{rank}") for rank in range(self._size)]
        if not self._await([*keys, self._key("next")], PATIENCE):
            raise TimeoutError
        objections = [self._store.get(key).decode() for key in keys]
        found = next((each for each in objections if each), "")
        return found, json.loads(self._store.get(self._key("next")))

    def join_again(self) -> None:
        """Make a new process group for the next attempt."""
        self._attempt += 1
        self._aborted = False
        distributed.init_process_group(
            self._backend,
            store=distributed.distributed_c10d.PrefixStore(f"{self._attempt}", self._store),
            rank=self._rank,
            world_size=self._size,
            timeout=self._timeout,
            device_id=self._device,
        )

    def _key(self, name: str) -> str:
        return f"{self._attempt}/{name}"

    def _await(self, keys: list[str], seconds: float) -> bool:
        """Return whether all keys are set within ``seconds``.

        It polls: a blocking wait would keep other threads from using the store.
        """
        deadline, pause = time.monotonic() + seconds, 0.001
        try:
            while not self._store.check(keys):
                if time.monotonic() > deadline:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
        except distributed.DistNetworkError:
            return False  # the rank that keeps the store has ended
        return True


def _release_defaults() -> None:
    """Replace the process group in the defaults of torch's functions by ``None``.

    ``torch.distributed.nn.functional`` has arguments ``group=group.WORLD``, evaluated at import,
    which the first ``DistributedDataParallel`` does. They would keep that group's connections open.
    ``None`` means the default group at the time of the call.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    group = distributed.ProcessGroup
    for function in vars(module).values() if module is not None else ():
        defaults = getattr(function, "__defaults__", None)
        if isinstance(defaults, tuple) and any(isinstance(each, group) for each in defaults):
            replaced = (None if isinstance(each, group) else each for each in defaults)
            function.__defaults__ = tuple(replaced)


def _release_meshes() -> None:
    """Remove the process groups from all device meshes, and clear DTensor's sharding cache.

    A cached sharding would give the next attempt's tensors the old mesh, because meshes with equal
    shapes compare equal.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import debug

    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
    for mesh in [each for each in gc.get_objects() if type(each) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()
