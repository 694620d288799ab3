"""The layout of a root's calls: how the batch is split, and how the outputs are joined.

A *layout* says which tensor arguments have a batch dimension and which dimension that is. For each
output it has the rule by which the chunks' outputs become the output of the batch. ``split_check``
finds the layout with the rules that ``split_rules`` compares, and ``chunked_call`` uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from autofit.exceptions import Refused
from autofit.strategies.base import Deferred
from autofit.worker.harness.torch_state.pytree import flatten
from autofit.worker.harness.torch_state.reachable_state import Place, equal

Cut = tuple[int, int]
"""A range of samples: the first one, and the one after the last."""


class Rule(StrEnum):
    """How one output of the chunks becomes the output of the batch."""

    CONCATENATE = "concatenate"
    """Concatenation along ``dim``; each sample has one or more consecutive rows."""
    TURNS = "turns"
    """Interleaving along ``dim``: the first row of each sample, then the second row of each. Such
    outputs have time before batch."""
    SAMPLES = "samples"
    """A mean over samples; a chunk's weight is its share of the samples."""
    TOKENS = "tokens"
    """A mean over the labels that count; a chunk's weight is its share of them."""
    SUM = "sum"
    """A sum over samples."""
    SAME = "same"
    """Every chunk gives the same value, such as a number, a string or ``None``. Each call checks
    this."""


class Unverified(Refused):
    """Nobody has verified how such a call is split, and this run does not."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The argument whose entries are the divisor of a mean loss, such as labels or a mask."""

    leaf: int
    """The argument's position among the flattened arguments."""
    ignore_index: int = 0
    """Entries equal to it do not count."""
    shift: int = 0
    """1 if the model drops each sample's first label (next-token prediction), else 0."""
    values: bool = False
    """The entries are the counts themselves, as lengths or weights are."""
    weights: torch.Tensor | None = field(default=None, compare=False)
    """The weight of each class (the ``weight`` of cross-entropy)."""

    def counts(self, labels: torch.Tensor, dim: int) -> list[float]:
        """Return how many labels of each sample count. Synchronizes with the device."""
        rows = labels.detach().movedim(dim, 0)
        counted = (rows if rows.ndim == 1 else rows[..., self.shift :]).reshape(len(rows), -1)
        if self.values:
            each = counted.double()
        elif self.weights is not None:
            known = counted != self.ignore_index
            classes = counted.clamp(0, len(self.weights) - 1).to(self.weights.device)
            each = self.weights[classes].double() * known.to(self.weights.device)
        else:
            each = counted != self.ignore_index
        counts: list[float] = each.sum(1).tolist()
        return counts


@dataclass(frozen=True, slots=True)
class Join:
    """The rule for one output, with its dimension and its labels."""

    rule: Rule
    dim: int = 0
    labels: Labels | None = None
    """The labels that count, for the rule ``TOKENS``."""
    detached: bool = False
    """The output has no gradient, as a metric has none."""

    @property
    def rows(self) -> bool:
        """Whether each sample has rows of its own in the output."""
        return self.rule in (Rule.CONCATENATE, Rule.TURNS)

    def by_sample(self, output: torch.Tensor, samples: int) -> tuple[torch.Tensor, int]:
        """Return a view of ``output`` with a dimension for the samples, and that dimension.

        The view has the dimension ``dim`` split in two: samples and rows of a sample.
        """
        if self.rule is Rule.TURNS:
            return output.unflatten(self.dim, (-1, samples)), self.dim + 1
        return output.unflatten(self.dim, (samples, -1)), self.dim

    def flat(self, view: torch.Tensor) -> torch.Tensor:
        """Merge the two dimensions of a view that ``by_sample`` returned."""
        return view.flatten(self.dim, self.dim + 1)

    @property
    def scalar(self) -> bool:
        """Whether the chunks' outputs are added with weights to one number for the batch."""
        return self.rule in (Rule.SAMPLES, Rule.TOKENS, Rule.SUM)


@dataclass(frozen=True, slots=True)
class Batch:
    """The flattened arguments of a call."""

    leaves: list[Any]
    spec: TreeSpec

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> Batch:
        """Flatten the arguments of a call."""
        return cls(*flatten((args, kwargs)))

    def call(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``(args, kwargs)`` with ``leaves`` in the places of the batch's own."""
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        return args, kwargs


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of one kind of call of a root."""

    dim: int
    """The batch dimension of the arguments."""
    batched: tuple[int, ...]
    """Positions of the arguments that have the batch dimension."""
    joins: tuple[Join, ...]
    """A rule for each flattened output."""
    draws: bool = False
    """The forward draws random numbers."""
    updates: tuple[Place, ...] = field(default=(), compare=False)
    """The state that every call updates in the same way, whatever its samples."""
    shown: Batch | None = field(default=None, compare=False, repr=False)
    """The samples on which a check has found the rules too, beside those of the call."""
    kind: Any = field(default=None, compare=False, repr=False)
    """The kind of call (``layout_cache.CallKind``)."""

    def size(self, batch: Batch) -> int:
        """Return the number of samples in a call."""
        return int(batch.leaves[self.batched[0]].shape[self.dim])

    def select(self, batch: Batch, cut: Cut) -> list[Any]:
        """Return the arguments of the samples in ``cut``: views, or copies of strided slices."""
        leaves = list(batch.leaves)
        for index in self.batched:
            some = leaves[index].narrow(self.dim, cut[0], cut[1] - cut[0])
            leaves[index] = some.contiguous() if leaves[index].is_contiguous() else some
        return leaves

    def fits(self, batch: Batch) -> bool:
        """Return whether all arguments with a batch dimension have the same number of samples."""
        sizes = {
            tensor.shape[self.dim] if isinstance(tensor, torch.Tensor) and tensor.ndim else None
            for tensor in (batch.leaves[index] for index in self.batched)
        }
        return len(sizes) == 1 and None not in sizes

    def weights(self, join: Join, batch: Batch) -> Weights:
        """Return the weight of each sample in a scalar output with the rule ``join``."""
        if join.rule is Rule.SUM:
            return Weights(None)
        if join.labels is not None:
            return Weights(join.labels.counts(batch.leaves[join.labels.leaf], self.dim))
        return Weights([1] * self.size(batch))


@dataclass(frozen=True, slots=True)
class Weights:
    """The weight of each sample in a mean, in samples or labels; ``None`` for a sum."""

    counts: Sequence[float] | None

    def of(self, cut: Cut) -> float:
        """Return the weight of a chunk's mean in the mean of the batch.

        The weight is zero if no label of the chunk counts. The chunk's mean is 0/0 then and must be
        ignored.
        """
        if self.counts is None:
            return 1.0
        total = sum(self.counts)
        if not total:  # no label counts: every chunk's mean is 0/0 or zero
            return (cut[1] - cut[0]) / len(self.counts)
        return sum(self.counts[cut[0] : cut[1]]) / total


def joined(join: Join, column: Sequence[Any], cuts: Sequence[Cut], weights: Sequence[float]) -> Any:
    """Return one output of the batch from the outputs of its chunks.

    ``weights`` has each chunk's weight if ``join`` is scalar. Raises ``Refused`` if the chunks'
    outputs do not fit together.
    """
    if len(column) == 1:
        return column[0]
    if join.rows and any(isinstance(part, Deferred) for part in column):
        return _deferred(join, column, cuts)
    if join.rows:
        try:
            if join.rule is Rule.CONCATENATE:
                return torch.cat(list(column), dim=join.dim)
            sizes = [stop - start for start, stop in cuts]
            views = [join.by_sample(*pair)[0] for pair in zip(column, sizes, strict=True)]
            return join.flat(torch.cat(views, dim=join.dim + 1))
        except RuntimeError as error:
            shapes = {_beside(part, join.dim) for part in column}
            if len(shapes) < 2 and join.rule is Rule.CONCATENATE:
                raise
            raise Refused("the parts of the batch have outputs of different shapes") from error
    if join.scalar:
        return _total(column, weights)
    first = column[0]
    if all(equal(part, first) for part in column[1:]):
        return first
    raise Refused("an output that did not depend on the samples now does")


def _deferred(join: Join, column: Sequence[Any], cuts: Sequence[Cut]) -> Any:
    """Join lazy outputs into one lazy output, or compute them if that is not possible."""
    first, *others = column
    if join.rule is Rule.CONCATENATE and all(isinstance(part, Deferred) for part in column):
        found = first.joined(others, join.dim)
        if found is not None:
            return found
    values = [part.value() if isinstance(part, Deferred) else part for part in column]
    return joined(join, values, cuts, [])


def _beside(part: torch.Tensor, dim: int) -> tuple[int, ...]:
    return tuple(size for axis, size in enumerate(part.shape) if axis != dim)


def _total(column: Sequence[Any], weights: Sequence[float]) -> Any:
    pairs = [(part, weight) for part, weight in zip(column, weights, strict=True) if weight]
    if not isinstance(column[0], torch.Tensor):
        total = sum(part * weight for part, weight in pairs)
        return type(column[0])(total)
    scaled = [part if weight == 1.0 else part * weight for part, weight in pairs]
    return torch.stack(scaled).sum(0).to(column[0].dtype)


def cuts(start: int, stop: int, largest: int) -> list[Cut]:
    """Cut samples ``start`` to ``stop`` into the fewest even chunks of at most ``largest``."""
    size = stop - start
    count = -(-size // largest)
    bounds = [start + size * index // count for index in range(count + 1)]
    return list(pairwise(bounds))


def equal_cuts(size: int, largest: int) -> list[Cut]:
    """Cut ``size`` samples into chunks of one size of at most ``largest``.

    If that size is less than half of ``largest``, return chunks that are as even as possible.
    """
    step = next(each for each in range(min(size, largest), 0, -1) if size % each == 0)
    if 2 * step < min(size, largest):
        return cuts(0, size, largest)
    return [(start, start + step) for start in range(0, size, step)]


def cuts_for_keeping(size: int, largest: int) -> list[Cut]:
    """Cut ``size`` samples so that the last chunk is as large as possible and the others are even.

    The last chunk's graph is stored, so only the other chunks run again in backward.
    """
    first = max(0, size - largest)
    return [*(cuts(0, first, largest) if first else []), (first, size)]
