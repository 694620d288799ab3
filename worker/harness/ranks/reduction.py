"""Sums gradients over the ranks, while the backward pass still computes others.

Gradients lie in *buckets*, vectors that are summed in one message each. Each rank starts the sums
in the same order, that in which rank 0 completed the gradients when the ranks were last compared.
A hook on the last parameter of each bucket copies the gradients to their places and starts the sum,
so most parameters need no Python during backward. A bucket that still lacks a gradient waits for
the next hook, or for the end. The gradients that autograd gets are views of the buckets.

Source: https://arxiv.org/abs/2006.15704, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any
from weakref import ref

import torch

from autofit.exceptions import Refused
from autofit.strategies import RANKS
from autofit.worker.harness.ranks.group import RankGroup

BUCKET = 1 << 25
"""Bytes that are summed in one message at least, if there are as many."""
MESSAGES = 16
"""About the most sums of a backward pass: each takes time to start."""
ALIGNMENT = 256
"""Bytes of which the place of a gradient is a multiple; vectorized kernels need up to 16."""
SPARSE = "the model has sparse gradients, which are not summed over ranks"

Gradient = torch.Tensor | None


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
        self._parameters: list[ref[torch.Tensor]] = []
        """The parameters of the last backward pass."""
        self._buckets: list[Bucket] = []
        """Where their gradients lie, in the order of the sums."""

    def of(self, parameters: Sequence[torch.Tensor], *, learns: bool = True) -> Reduction:
        """Return the reduction of a backward pass; ``parameters``: those that get gradients.

        ``learns``: the pass finds the order of the sums anew, which takes a hook on each parameter.
        """
        known = len(parameters) == len(self._parameters) and all(
            each() is own for each, own in zip(self._parameters, parameters, strict=True)
        )
        if not known:
            learns = True
            self._parameters, self._buckets = [*map(ref, parameters)], []
        return Reduction(self._sums, parameters, self._buckets, self._keep if learns else None)

    def _keep(self, made: list[Bucket]) -> None:
        self._buckets = made


class Reduction:
    """The sum of the gradients of one backward pass."""

    def __init__(
        self,
        sums: Sums,
        parameters: Sequence[torch.Tensor],
        planned: Sequence[Bucket],
        learn: Callable[[list[Bucket]], None] | None,
    ) -> None:
        self._sums = sums
        self._parameters = parameters
        self._buckets = planned
        self._learn = learn
        self._started: list[Sum] = []
        self._missing: list[int] = []
        """The parameters with a place in a sum that have no gradient here."""
        self._completed: list[int] = []
        """The gradients in the order in which this rank completed them, if the pass learns it."""
        self._sparse = False

    @property
    def planned(self) -> tuple[int, int]:
        """What must be the same on all ranks: the number of parameters, and of planned sums."""
        return len(self._parameters), len(self._buckets)

    @contextmanager
    def during(self) -> Iterator[None]:
        """Start sums within this context, one backward pass that adds to empty ``.grad``."""
        last = {bucket.positions[-1] for bucket in self._buckets}
        watched = last if self._learn is None else range(len(self._parameters))
        hooks = [
            self._parameters[i].register_post_accumulate_grad_hook(self._hook(i, i in last))
            for i in watched
        ]
        try:
            yield
        finally:
            for each in hooks:
                each.remove()

    def finish(self, others: Sequence[torch.Tensor] = ()) -> list[Gradient]:
        """Take the gradients from ``.grad`` and return their sums over the ranks.

        A gradient is ``None`` if no rank has one. One that is missing on a rank counts as zero: the
        samples of another rank may have taken another route. ``others``: tensors to sum too, whose
        sums come last. Raises ``Refused`` on all ranks if one has a sparse gradient.
        """
        while len(self._started) < len(self._buckets):
            self._start()
        rest = [i for i, each in enumerate(self._parameters) if each.grad is not None]
        self._sparse |= any(_is_sparse(self._parameters[i].grad) for i in rest)
        order = self._completed if self._learn is not None else None
        said = self._sums.group.meet(
            "the sum of gradients", (self._missing, rest, self._sparse, order)
        )
        if any(sparse for _, _, sparse, _ in said):
            raise Refused(SPARSE, RANKS)
        nowhere = set(self._missing).intersection(*(missing for missing, _, _, _ in said))
        late = sorted(set().union(*(found for _, found, _, _ in said)))
        tensors = [*(self._parameters[i] for i in late), *others]
        values = [*(self._take(i) for i in late), *others]
        sums = [Sum(each, values, self._sums) for each in _planned(tensors, range(len(tensors)))]
        found: list[Gradient] = [None] * len(self._parameters)
        for each in self._started:
            for i, view in each.wait():
                found[i] = None if i in nowhere else view
        summed: dict[int, torch.Tensor] = {}
        for each in sums:
            summed.update(each.wait())
        for number, i in enumerate(late):
            before = found[i]
            found[i] = summed[number] if before is None else before + summed[number]
        if self._learn is not None:
            first = said[0][3]
            whole_order = dict.fromkeys([*first, *reversed(range(len(found)))])
            self._learn(
                _planned(self._parameters, [i for i in whole_order if found[i] is not None])
            )
        return [*found, *(summed[len(late) + number] for number in range(len(others)))]

    def _hook(self, index: int, last: bool) -> Callable[[torch.Tensor], None]:
        """Return the hook of a parameter; ``last``: it is the last one of a bucket."""

        def complete(parameter: torch.Tensor) -> None:
            if self._learn is not None:
                self._completed.append(index)
            while (
                last
                and len(self._started) < len(self._buckets)
                and all(
                    self._parameters[i].grad is not None
                    for i in self._buckets[len(self._started)].positions
                )
            ):
                self._start()

        return complete

    def _start(self) -> None:
        """Start the next sum; gradients that are missing count as zero."""
        bucket = self._buckets[len(self._started)]
        values = {i: self._take(i) for i in bucket.positions}
        self._missing += [i for i, each in values.items() if each is None]
        self._started.append(Sum(bucket, values, self._sums))

    def _take(self, index: int) -> Gradient:
        """Return a gradient, and leave none; later parts of it are summed at the end."""
        parameter = self._parameters[index]
        found, parameter.grad = parameter.grad, None
        if _is_sparse(found):
            self._sparse = True
            return None
        return found


@dataclass(frozen=True, slots=True)
class Bucket:
    """A vector that holds gradients of one type and device, one after another."""

    positions: tuple[int, ...]
    """The positions of the tensors, whose gradients lie there."""
    places: tuple[tuple[torch.Size, tuple[int, ...], int], ...]
    """The shape, the strides and the first entry of each."""
    entries: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], positions: Sequence[int]) -> Bucket:
        """Return the bucket of the tensors at ``positions``, in the memory format of each."""
        places, size = [], 0
        for each in (tensors[i] for i in positions):
            places.append((each.shape, _strides(each), size))
            entries = ALIGNMENT // each.element_size()
            size += ceil(each.numel() / entries) * entries
        first = tensors[positions[0]]
        return cls(tuple(positions), tuple(places), size, first.dtype, first.device)


class Sum:
    """The sum over ranks of the gradients in one bucket, which runs."""

    def __init__(self, bucket: Bucket, gradients: Any, sums: Sums) -> None:
        """Start it; ``gradients``: by position. ``None`` counts as zero."""
        self._bucket = bucket
        values = torch.empty(bucket.entries, dtype=bucket.dtype, device=bucket.device)
        self._views = [values.as_strided(*each) for each in bucket.places]
        given = []
        with torch.no_grad():
            for i, view in zip(bucket.positions, self._views, strict=True):
                gradient = gradients[i]
                if gradient is None:
                    view.zero_()
                else:
                    given.append((view, gradient))
            if given:
                views, own = zip(*given, strict=True)
                torch._foreach_copy_(views, own)
        self._work = sums.start(values)

    def wait(self) -> Iterable[tuple[int, torch.Tensor]]:
        """Let what comes next see the sum; return each gradient with its position."""
        self._work.wait()
        return zip(self._bucket.positions, self._views, strict=True)


def buckets(tensors: Sequence[torch.Tensor], order: Iterable[int]) -> Iterator[list[int]]:
    """Yield positions whose tensors have one type and device, to be summed in one message.

    ``order``: the positions, in the order in which they come.
    """
    order = list(order)
    most = max(BUCKET, sum(tensors[i].nbytes for i in order) // MESSAGES)
    open_: dict[tuple[torch.dtype, torch.device], _Open] = {}
    for i in order:
        bucket = open_.setdefault((tensors[i].dtype, tensors[i].device), _Open([]))
        if bucket.positions and bucket.size + tensors[i].nbytes > most:
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


def _planned(tensors: Sequence[torch.Tensor], order: Iterable[int]) -> list[Bucket]:
    return [Bucket.of(tensors, each) for each in buckets(tensors, order)]


def _is_sparse(gradient: Gradient) -> bool:
    return gradient is not None and gradient.layout is not torch.strided


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that a gradient of ``tensor`` has."""
    if tensor.is_contiguous():
        return tensor.stride()
    meta = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    return torch.empty_like(meta, memory_format=torch.preserve_format).stride()
