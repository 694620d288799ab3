"""All ranks agree before any of them retries. Imports torch.

They speak through the store that ``torch.distributed`` was set up with, which works while a
collective is stuck. A rank that has run out of memory says so, lets go of what it holds and leaves
the process group. On gloo that alone frees the others: their collectives fail when a peer closes
its connections, and so on from rank to rank. On NCCL a thread sees the word in the store and aborts
the communicators. When every rank has said how its attempt ended and that it can start over, the
first one names the next rung, and a new process group is made from the same store.
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

PATIENCE = 60.0
"""Seconds a rank that cannot go on waits for the word of the others."""

FINISHED_PATIENCE = 600.0
"""Seconds a rank that has finished waits for the others to finish as well."""

HELD, SHORT, LOST, BROKEN = "held", "short", "lost", "broken"
"""How an attempt ended: well, out of memory, by another rank's failure, by an error of its own."""

_LOST = re.compile(
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
    """Return whether a module's own forward needs the other ranks to call it as well."""
    if isinstance(module, nn.SyncBatchNorm):
        return module.training
    if not _SHARDED.isdisjoint(each.__name__ for each in type(module).__mro__):
        return True  # between its forward and backward it may hold whole tensors
    spread = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return any(isinstance(each, spread) for each in module._parameters.values())


class Ranks:
    """The ranks in one call of a decorated function: every rank makes the same calls in turn."""

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
        self._freed = False
        """The watcher has taken the group away: whatever failed then failed of that."""
        if "nccl" in self._backend and self._device is None:
            self._connect()

    def _connect(self) -> None:
        """Make NCCL's communicator before the function does.

        A rank that waits in NCCL for others to join a communicator cannot be freed. Needs to know
        each rank's GPU: where two name the same one, the function is still to choose its own.
        """
        device = torch.device("cuda", torch.cuda.current_device())
        self._store.set(f"gpu/{self._rank}", str(torch.cuda.get_device_properties(device).uuid))
        keys = [f"gpu/{rank}" for rank in range(self._size)]
        self._store.wait(keys, timedelta(seconds=FINISHED_PATIENCE))
        if len({self._store.get(key) for key in keys}) == self._size:
            self._device = device
            distributed.all_reduce(torch.zeros(1, device=device))

    def lost(self, error: BaseException) -> bool:
        """Return whether an error only says that another rank is gone."""
        known = isinstance(error, (RuntimeError, OSError)) and bool(_LOST.search(str(error)))
        return known or self._freed

    @property
    def first(self) -> bool:
        """Whether this rank decides."""
        return self._rank == 0

    def same_start(self, kept: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return what the first rank remembers: all start there."""
        if self.first:
            self._store.set("start", json.dumps(kept))
            return kept
        self._await(["start"], PATIENCE)
        found: Mapping[str, Any] | None = json.loads(self._store.get("start"))
        return found

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Free this rank from a stuck collective when another says that memory ran out."""
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
                self._freed = True
                _release_defaults()
                distributed.distributed_c10d._abort_process_group()
                return

    def say(self, how: str) -> None:
        """Tell the others how this rank's attempt ended; does not wait."""
        with suppress(distributed.DistNetworkError):  # the store is gone: nobody listens
            if how != HELD:
                self._store.set(self._key("failed"), how)
            self._store.set(self._key(f"ended/{self._rank}"), how)

    def heard(self, seconds: float) -> list[str] | None:
        """Return how the attempt ended on each rank; ``None`` when one has not said so in time."""
        keys = [self._key(f"ended/{rank}") for rank in range(self._size)]
        if not self._await(keys, seconds):
            return None
        return [self._store.get(key).decode() for key in keys]

    def leave(self) -> None:
        """Let go of the process group, so that no peer waits for this rank."""
        _release_defaults()
        if not distributed.is_initialized():
            pass  # the watcher has left it
        elif "nccl" in self._backend:
            distributed.distributed_c10d._abort_process_group()
        else:
            distributed.destroy_process_group()
        _release_meshes()
        gc.collect()  # gloo's connections close with the last reference

    def agree(self, objection: str, rung: Mapping[str, Any] | None) -> tuple[str, Any]:
        """Return the first objection of any rank, and what the first rank wants to try next.

        Raises ``TimeoutError`` when a rank does not answer.
        """
        if self.first:
            self._store.set(self._key("next"), json.dumps(rung))
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
        self._freed = False
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
        """Wait for keys, in short looks so that other threads may use the store in between."""
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
    """Let torch's own functions hold the default group no longer.

    ``torch.distributed.nn.functional`` has arguments ``group=group.WORLD``: the group of the moment
    when it was imported (by the first ``DistributedDataParallel``) would never close its
    connections. ``None`` means the default group of the moment when it is called.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    group = distributed.ProcessGroup
    for function in vars(module).values() if module is not None else ():
        defaults = getattr(function, "__defaults__", None)
        if isinstance(defaults, tuple) and any(isinstance(each, group) for each in defaults):
            kept = (None if isinstance(each, group) else each for each in defaults)
            function.__defaults__ = tuple(kept)


def _release_meshes() -> None:
    """Let the meshes of the failed attempt, and DTensor's caches that keep them, hold no group.

    A cached sharding would also give the next attempt's tensors the old mesh: meshes are equal
    when their shapes are.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import debug

    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
    for mesh in [each for each in gc.get_objects() if type(each) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()
