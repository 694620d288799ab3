"""Gives every plan of a trial the same batches, the largest of the epoch among them.

Padded batches differ in size. A trial lasts a few steps, but the real run will meet the largest
batch, and plans can only be compared on the same batches. A trial therefore reads some batches
ahead if the batches of a loader differ in size. Every plan gets the same short selection, in the
loader's order. The largest batch comes second, when the first step after a change is over. The
loader's own position advances as usual, so epochs keep their length.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle, repeat
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autofit.strategies.inspection.tokens import longest

GLANCE = 4
"""Batches read before the first one is given. If all have one size, reading ahead ends."""
AHEAD = 32
"""Batches read ahead if sizes differ."""
MOST_BYTES = 1 << 30
"""Limit of the memory for batches that are read ahead."""
KEPT = 8
"""Batches in the selection; the others are only counted."""

Next = Callable[[Any], Any]


@dataclass
class _Ahead:
    """The batches that were read ahead from one iterator."""

    batches: deque[Any] = field(default_factory=deque)
    """``None`` for each batch that one of the selection replaces."""
    ended: bool = False

    def next(self, plain: Next, iterator: Any) -> Any:
        if self.batches:
            return self.batches.popleft()
        if self.ended:
            raise StopIteration
        return plain(iterator)


class SameBatches:
    """Replaces the batches of loaders whose batches differ in size by a fixed selection."""

    def __init__(self) -> None:
        self._ahead: weakref.WeakKeyDictionary[Any, _Ahead] = weakref.WeakKeyDictionary()
        """Keyed by iterator."""
        self._selected: dict[int, list[Any] | None] = {}
        """Keyed by the data set's ``id``; ``None`` if all batches have one size."""
        self._seen: list[Any] = []
        """The data sets. They stay alive, so that no other object gets the ``id`` of one."""
        self._given: dict[int, Iterator[Any]] = {}
        self._second = 1

    def again(self, calls_per_step: int = 1) -> None:
        """Start every selection from its beginning, because another plan is measured.

        ``calls_per_step``: batches in an optimizer step; the largest batch comes after the first
        step.
        """
        self._second = calls_per_step
        self._given.clear()

    def next(self, plain: Next, iterator: Any) -> Any:
        """Return the next batch of ``iterator``; ``plain`` is the loader's own ``__next__``."""
        data = id(iterator._dataset)
        if data not in self._selected:
            self._seen.append(iterator._dataset)
            ahead = self._ahead[iterator] = _Ahead()
            self._selected[data] = _read(ahead, plain, iterator)
        batch = self._ahead.get(iterator, _NOTHING).next(plain, iterator)
        selected = self._selected[data]
        if selected is None:
            return batch
        if data not in self._given:
            largest, *others = selected
            self._given[data] = cycle([*others[: self._second], largest, *others[self._second :]])
        return copy.deepcopy(next(self._given[data]))  # the script may change what it gets


_NOTHING = _Ahead()


def _read(ahead: _Ahead, plain: Next, iterator: Any) -> list[Any] | None:
    """Read ahead; return the selection, largest batch first.

    Returns ``None`` if all batches have one size: they are then given as they come.
    """
    sizes: list[int] = []
    first: list[Any] = []
    largest = None
    while len(sizes) < AHEAD and sum(sizes) < MOST_BYTES:
        if len(sizes) == GLANCE and len(set(sizes)) == 1:
            break
        try:
            batch = plain(iterator)
        except StopIteration:
            ahead.ended = True
            break
        sizes.append(size(batch))
        if sizes[-1] > max(sizes[:-1], default=-1):
            largest = batch
        if len(first) < KEPT:
            first.append(batch)
    differ = len(set(sizes[:-1])) > 1 or sizes[-1:] > sizes[:1]  # the last of an epoch may be short
    ahead.batches.extend(repeat(None, len(sizes)) if differ else first)
    others = [batch for batch in first if batch is not largest]
    return [largest, *others[: KEPT - 1]] if differ else None


def size(batch: Any) -> int:
    """Return the bytes of a batch's tensors.

    Positions that every sample masks at its end are left out. The largest batch can thus be found
    among batches that are padded to one length.
    """
    named = dict(batch) if hasattr(batch, "keys") else {}
    leaves = tree_leaves(named or batch)
    whole = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
    return int(whole * longest(named))
