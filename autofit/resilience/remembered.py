"""Remembers which setting fitted for a function and its arguments, across processes.

Memory reads the store once for each key, and writes it when another setting fits. A failure of the
store is logged once and does not stop the training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from autofit.exceptions import AutofitError
from autofit.facts import HOST
from autofit.resilience.call_key import Key, digest
from autofit.storage import FittedKey, default_url
from autofit.storage.url import exists
from autofit.worker import meter
from autofit.worker.cluster.versions import versions
from autofit.worker.meter import accelerator
from autofit.worker.meter.kinds.cpu import ShimMeter

log = logging.getLogger("autofit.resilient")

T = TypeVar("T")
Values = Mapping[str, int | str]
FITTED = "fitted"
"""Name of what fitted, in the store: ``{"batch_size": 64}``, ``{"plan": ...}`` or the like."""


class Memory:
    """The settings that fitted for one decorated function, by the key of its arguments."""

    def __init__(self, function: str, storage: str | None = None) -> None:
        self._function = function
        self._storage = storage
        self._known: dict[Key, Values | None] = {}
        self._warned = False

    def recall(self, key: Key) -> Values | None:
        """Return the setting that fitted last for calls with this key; ``None`` if unknown."""
        if key not in self._known:
            self._known[key] = self._guarded(lambda: self._read(key))
        return self._known[key]

    def remember(self, key: Key, values: Values, *, is_new: bool, this_rank: bool = False) -> None:
        """Remember the setting that fitted, and write it to the store if it changed.

        ``is_new``: the setting is not the first one that the decorator tries.
        ``this_rank``: this rank writes the store; by default only the first rank does.
        """
        before = self._known.get(key)
        if before == values or (before is None and not is_new):
            return
        self._known[key] = dict(values)
        self._guarded(lambda: self._write(key, values, this_rank))

    def forget(self) -> None:
        """Forget all settings, for the rest of this process."""
        self._known = dict.fromkeys(self._known)

    def _read(self, key: Key) -> Values | None:
        if not exists(self._storage):
            return None
        from autofit.storage import Store

        with Store(self._storage, create=False) as store:
            found = store.discoveries(self._key(key))
        return found[FITTED].content if FITTED in found else None

    def _write(self, key: Key, values: Values, this_rank: bool) -> None:
        if not (this_rank or _ranks() == 1 or torch.distributed.get_rank() == 0):
            return
        from autofit.storage import Store

        with Store(self._storage or default_url()) as store:
            store.learn(self._key(key), {FITTED: dict(values)}, versions=versions())

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
        except (AutofitError, OSError) as error:
            if not self._warned:
                self._warned = True
                log.warning("%s: cannot remember what fits: %s", self._function, error)
            return None


def _device() -> tuple[str, int]:
    """Return the name of the device, and the bytes of its memory that this process may use."""
    if accelerator.device() != HOST:
        return accelerator.name(), accelerator.usable()
    hardware = meter.hardware(HOST)
    shim = ShimMeter.loaded()
    return hardware.name, (shim.capacity if shim else None) or hardware.total_bytes


def _ranks() -> int:
    in_use = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if in_use else 1
