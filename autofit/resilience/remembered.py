"""What held, by function and arguments: where the next call starts, in this process or another.

The store is read once for each kind of call and written when something else held than before. It
is a convenience: whatever is wrong with it is logged once, and the training goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from autofit.exceptions import AutofitError
from autofit.resilience.call_key import Key, digest
from autofit.storage import FittedKey, default_url
from autofit.storage.url import exists
from autofit.worker import meter
from autofit.worker.cluster.versions import versions
from autofit.worker.meter.cpu import ShimMeter

log = logging.getLogger("autofit.resilient")

T = TypeVar("T")
Remembered = Mapping[str, int | str]


class Memory:
    """What one decorated function remembers."""

    def __init__(self, function: str, storage: str | None = None) -> None:
        self._function = function
        self._storage = storage
        self._known: dict[Key, Remembered | None] = {}
        self._complained = False

    def recall(self, key: Key) -> Remembered | None:
        """Return what held last for such a call."""
        if key not in self._known:
            self._known[key] = self._guarded(lambda: self._read(key))
        return self._known[key]

    def remember(self, key: Key, kept: Remembered, *, news: bool, alone: bool = False) -> None:
        """Keep what held. ``news``: it is not what the function was asked to start with.

        ``alone``: this rank has come to know it, and not the first one too, which else writes.
        """
        before = self._known.get(key)
        if before == kept or (before is None and not news):
            return
        self._known[key] = dict(kept)
        self._guarded(lambda: self._write(key, kept, alone))

    def forget(self) -> None:
        """Start every call where it was asked to, for the rest of this process."""
        self._known = dict.fromkeys(self._known)

    def _read(self, key: Key) -> Remembered | None:
        if not exists(self._storage):
            return None
        from autofit.storage import Store

        with Store(self._storage, create=False) as store:
            found = store.fitted(self._key(key))
        return None if found is None else found.kept

    def _write(self, key: Key, kept: Remembered, alone: bool) -> None:
        if not (alone or _writes()):
            return
        from autofit.storage import Store

        with Store(self._storage or default_url()) as store:
            store.keep_fitted(self._key(key), kept, versions=versions())

    def _key(self, key: Key) -> FittedKey:
        name, memory = _device()
        return FittedKey(
            function=self._function,
            arguments=digest(key),
            device=name,
            memory=memory,
            ranks=_ranks(),
        )

    def _guarded(self, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except (AutofitError, OSError) as error:  # a store must never end a training
            if not self._complained:
                self._complained = True
                log.warning("%s: what fits is not remembered: %s", self._function, error)
            return None


def _device() -> tuple[str, int]:
    """Return the device's name and the bytes of it that this process may use."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        share = torch.cuda.get_per_process_memory_fraction()
        return str(properties.name), int(properties.total_memory * share)
    hardware = meter.hardware("cpu")
    shim = ShimMeter.loaded()
    return hardware.name, (shim.capacity if shim else None) or hardware.total_bytes


def _ranks() -> int:
    in_use = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if in_use else 1


def _writes() -> bool:
    """Return whether this rank writes: one is enough."""
    return _ranks() == 1 or torch.distributed.get_rank() == 0
