"""Sums gradients over the ranks, while the backward pass still computes others.

Gradients lie in *buckets*, vectors that are summed in one message each. A hook on each parameter
replaces its complete gradient by a place in a bucket. One copy fills the bucket once it has all of
them. Each rank starts the sums in the same order, so a full bucket waits for those before it. The
order is that in which the gradients of the last backward pass were complete on rank 0. The
gradients that autograd gets are views of the buckets.

Source: https://arxiv.org/abs/2006.15704, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from autofit.exceptions import Refused
from autofit.worker.harness.ranks.group import RankGroup

BUCKET = 1 << 25
"""Bytes that are summed in one message."""
ALIGNMENT = 256
"""Bytes of which the place of a gradient is a multiple; vectorized kernels need up to 16."""
SPARSE = "the model has sparse gradients, which are not summed over ranks"

Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


@dataclass(frozen=True, slots=True)
class Sums:
    """How the sums of one root travel."""

    group: RankGroup
    channel: Any
    """A channel of their own, in which no other message comes between; else ``None``."""

    def start(self, values: torch.Tensor) -> Any:
        """Start a sum over ranks, in place; ``wait`` of the result ends it."""
        return self.group.start_sum(values, self.channel)


class Reductions:
    """The sums of the backward passes of one root."""

    def __init__(self, group: RankGroup, *, apart: bool = False) -> None:
        """Create it for ``group``; ``apart``: backward passes send other messages too."""
        self._sums = Sums(group, group.channel() if apart else None)
        self._kinds: list[Kind] = []
        """The tensors of the last backward pass."""
        self._order: list[int] = []
        """Those that had gradients, in the order in which rank 0 completed them."""

    def of(self, tensors: Sequence[torch.Tensor]) -> Reduction:
        """Return the reduction of a backward pass; ``tensors``: those that get gradients."""
        kinds = [_kind(each) for each in tensors]
        order = self._order if kinds == self._kinds else []
        return Reduction(self._sums, tensors, order, self._keep)

    def _keep(self, tensors: Sequence[torch.Tensor], order: list[int]) -> None:
        self._kinds, self._order = [_kind(each) for each in tensors], order


class Reduction:
    """The sum of the gradients of one backward pass."""

    def __init__(
        self,
        sums: Sums,
        tensors: Sequence[torch.Tensor],
        order: Sequence[int],
        keep: Callable[[Sequence[torch.Tensor], list[int]], None],
    ) -> None:
        self._sums = sums
        self._tensors = tensors
        self._order = order
        self._keep = keep
        self._buckets = [_Bucket(tensors, each) for each in buckets(tensors, order)]
        self._places = {i: bucket for bucket in self._buckets for i in bucket.places}
        self._started = 0
        """Number of buckets whose sum has started."""
        self._completed: list[int] = []
        """The gradients in the order in which this rank completed them."""

    @property
    def planned(self) -> tuple[int, int]:
        """What must be the same on all ranks: the number of tensors, and of planned sums."""
        return len(self._tensors), len(self._buckets)

    @contextmanager
    def during(self, count: int) -> Iterator[None]:
        """Start sums within this context, a backward pass, for the first ``count`` tensors."""
        hooks = [self._tensors[i].register_hook(self._hook(i)) for i in range(count)]
        try:
            yield
        finally:
            for each in hooks:
                each.remove()

    def finish(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the sum over ranks of each gradient; ``None`` if no rank has one.

        A gradient that is missing on one rank only counts as zero: the samples of another rank may
        have taken another route. Raises ``Refused`` on all ranks if one has a sparse gradient.
        """
        missing = [i for i, each in enumerate(gradients) if each is None]
        sparse = any(each is not None and each.layout is not torch.strided for each in gradients)
        if not sparse:
            for i, gradient in enumerate(gradients):
                self._add(i, gradient)
        self._start(len(self._buckets))
        order = None if self._completed == self._order else self._completed
        said = self._sums.group.meet("the sum of gradients", (missing, sparse, order))
        if any(each for _, each, _ in said):
            raise Refused(SPARSE, "ranks")
        nowhere = set(missing).intersection(*(others for others, _, _ in said))
        wanted = set(range(len(gradients))).difference(nowhere)
        others = sorted(wanted.difference(self._places))
        late = [_Bucket(self._tensors, each) for each in buckets(self._tensors, others)]
        for bucket in late:
            for i in bucket.places:
                bucket.add(i, gradients[i])
            bucket.start(self._sums)
        found: list[torch.Tensor | None] = [None] * len(gradients)
        for bucket in (*self._buckets, *late):
            bucket.wait()
            for i in wanted.intersection(bucket.places):
                found[i] = bucket.view(i)
        first = self._order if said[0][2] is None else said[0][2]
        self._keep(self._tensors, [i for i in first if i in wanted])
        return found

    def _hook(self, index: int) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def complete(gradient: torch.Tensor) -> torch.Tensor | None:
            self._completed.append(index)
            if gradient.layout is not torch.strided:
                return None
            bucket = self._places.get(index)
            if bucket is None:
                return None
            bucket.add(index, gradient)
            if bucket.full:
                self._start(self._ready())
            return bucket.view(index)

        return complete

    def _add(self, index: int, gradient: torch.Tensor | None) -> None:
        bucket = self._places.get(index)
        if bucket is not None and gradient is not None:
            bucket.add(index, gradient)

    def _ready(self) -> int:
        """Return the number of buckets at the start of the order whose sums can have started."""
        found = self._started
        while found < len(self._buckets) and self._buckets[found].full:
            found += 1
        return found

    def _start(self, until: int) -> None:
        while self._started < until:
            self._buckets[self._started].start(self._sums)
            self._started += 1


class _Bucket:
    """Gradients of one type and device, one after another in one vector."""

    def __init__(self, tensors: Sequence[torch.Tensor], positions: Iterable[int]) -> None:
        self._like = {i: tensors[i] for i in positions}
        self.places: dict[int, int] = {}
        """The first entry of each gradient, by its position among all tensors."""
        self._size = 0
        for i, tensor in self._like.items():
            self.places[i] = self._size
            entries = ALIGNMENT // tensor.element_size()
            self._size += ceil(tensor.numel() / entries) * entries
        self._values: torch.Tensor | None = None
        self._views: dict[int, torch.Tensor] = {}
        self._added: set[int] = set()
        self._waiting: dict[int, torch.Tensor] = {}
        """The gradients that are still to be copied to their places."""
        self._work: Any = None

    @property
    def full(self) -> bool:
        """Whether all gradients are there."""
        return len(self._added) == len(self.places)

    def add(self, index: int, gradient: torch.Tensor | None) -> None:
        """Take a gradient, unless it is there; zeros for ``None``. The last one fills the places.

        Only then do the places have values.
        """
        if index in self._added:
            return
        self._added.add(index)
        if gradient is None:
            self.view(index).zero_()
        else:
            self._waiting[index] = gradient
        if self.full and self._waiting:
            with torch.no_grad():
                torch._foreach_copy_(
                    [self.view(each) for each in self._waiting], list(self._waiting.values())
                )
            self._waiting.clear()

    def view(self, index: int) -> torch.Tensor:
        """Return the place of a gradient, in the memory format of its tensor."""
        found = self._views.get(index)
        if found is None:
            like = self._like[index]
            if self._values is None:
                self._values = like.new_empty(self._size)
            found = self._values.as_strided(like.shape, _strides(like), self.places[index])
            self._views[index] = found
        return found

    def start(self, sums: Sums) -> None:
        """Start the sum over ranks; gradients that are missing count as zero."""
        for i in self.places:
            self.add(i, None)
        assert self._values is not None, "a bucket has gradients"
        self._work = sums.start(self._values)

    def wait(self) -> None:
        """Let what comes next see the sum."""
        self._work.wait()


def buckets(tensors: Sequence[torch.Tensor], order: Iterable[int]) -> Iterator[list[int]]:
    """Yield positions whose tensors have one type and device, and at most ``BUCKET`` bytes.

    ``order``: the positions, in the order in which they come.
    """
    open_: dict[tuple[torch.dtype, torch.device], _Open] = {}
    for i in order:
        bucket = open_.setdefault((tensors[i].dtype, tensors[i].device), _Open([]))
        if bucket.positions and bucket.size + tensors[i].nbytes > BUCKET:
            yield bucket.positions
            bucket.positions, bucket.size = [], 0
        bucket.positions.append(i)
        bucket.size += tensors[i].nbytes
    for bucket in open_.values():
        yield bucket.positions


@dataclass(slots=True)
class _Open:
    positions: list[int]
    size: int = 0


def _kind(tensor: torch.Tensor) -> Kind:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that a gradient of ``tensor`` has."""
    if tensor.is_contiguous():
        return tensor.stride()
    meta = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    return torch.empty_like(meta, memory_format=torch.preserve_format).stride()
