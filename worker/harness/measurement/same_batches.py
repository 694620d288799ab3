"""The same batches for every plan, the largest of the epoch among them.

Padded batches differ in size. A trial lasts some steps; it must meet the worst batch, which may
come at three in the morning in the real run, and plans that are compared must meet the same ones.
So in a trial, and only there, a loader whose batches differ is read some batches ahead, and the
same short selection is given again for every plan: as they come, with the largest in second place,
where the first step after a change is over. The loader is read on meanwhile, so that epochs are as
long as ever.
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
"""Batches read before the first is given; if they are all of one size, no more are."""
AHEAD = 32
"""Batches read where sizes differ."""
MOST_BYTES = 1 << 30
"""No more than so much is read ahead."""
KEPT = 8
"""Batches in the selection; of the others only how many they are is kept."""

Next = Callable[[Any], Any]


@dataclass
class _Ahead:
    """What one iterator has been read ahead."""

    batches: deque[Any] = field(default_factory=deque)
    """``None`` where those of a selection are given in their place."""
    ended: bool = False

    def next(self, plain: Next, iterator: Any) -> Any:
        if self.batches:
            return self.batches.popleft()
        if self.ended:
            raise StopIteration
        return plain(iterator)


class SameBatches:
    """Gives the batches of loaders whose batches differ in size from a selection."""

    def __init__(self) -> None:
        self._ahead: weakref.WeakKeyDictionary[Any, _Ahead] = weakref.WeakKeyDictionary()
        """By iterator."""
        self._selected: dict[int, list[Any] | None] = {}
        """By the data set's ``id``; ``None`` where all batches are of one size."""
        self._seen: list[Any] = []
        """The data sets, kept so that no other takes the ``id`` of one."""
        self._given: dict[int, Iterator[Any]] = {}
        self._second = 1

    def again(self, calls_per_step: int = 1) -> None:
        """Begin the selections from their start: another plan is measured.

        ``calls_per_step``: batches in an optimizer step; the largest comes after the first step.
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
    """Read ahead as far as it is worth it; return the largest batch and some others.

    ``None`` where all are of one size: they come as they are.
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
    """Return the bytes in the tensors of a batch, whatever holds them.

    Without what all samples of it mask at their end: of batches padded to one length, too, the
    largest is to be met.
    """
    named = dict(batch) if hasattr(batch, "keys") else {}
    leaves = tree_leaves(named or batch)
    whole = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
    return int(whole * longest(named))
