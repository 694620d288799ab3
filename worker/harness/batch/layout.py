"""How a root's batch is split and its outputs are joined again.

A *layout* says which tensor arguments carry the batch and in which dimension, and by which rule
each output of the chunks becomes the output of the whole. The probe finds it; the bridge uses it.
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
from autofit.worker.harness.torch_state.reachable_state import Place

Cut = tuple[int, int]
"""A range of samples: the first, and the one after the last."""


class Rule(StrEnum):
    """How one output of the chunks becomes the output of the whole."""

    CONCATENATE = "concatenate"
    """Along ``dim``, one or more rows a sample."""
    TURNS = "turns"
    """Along ``dim``, the first row of each sample, then the second of each: time before batch."""
    SAMPLES = "samples"
    """A mean over samples: weighted by the chunk's share of the samples."""
    TOKENS = "tokens"
    """A mean over the labels that count: weighted by the chunk's share of those."""
    SUM = "sum"
    """A sum over samples."""
    SAME = "same"
    """Every chunk gives the same: a number, a string, ``None``. Looked at again in every call."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The argument by whose entries a mean loss divides (cross-entropy's ``target``, a mask)."""

    leaf: int
    """Position among the flattened arguments."""
    ignore_index: int = 0
    """Entries equal to it do not count."""
    shift: int = 0
    """1 where the model drops each sample's first label (next-token prediction), else 0."""
    values: bool = False
    """The entries are the counts themselves: lengths, weights."""
    weights: torch.Tensor | None = field(default=None, compare=False)
    """How much a label of each class counts (cross-entropy's ``weight``)."""

    def counts(self, labels: torch.Tensor, dim: int) -> list[float]:
        """Return how many labels of each sample count; waits for the device once."""
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
    """The rule for one output, the dimension it joins along, the labels it counts."""

    rule: Rule
    dim: int = 0
    labels: Labels | None = None
    """Set when the rule is ``TOKENS``."""
    detached: bool = False
    """No gradient comes through it: a metric."""

    @property
    def rows(self) -> bool:
        """Whether each sample has rows of its own in the output."""
        return self.rule in (Rule.CONCATENATE, Rule.TURNS)

    def by_sample(self, output: torch.Tensor, samples: int) -> tuple[torch.Tensor, int]:
        """Return a view of an output of rows with a dimension for its samples, and which it is.

        It stands for ``dim`` together with the one before or after it.
        """
        if self.rule is Rule.TURNS:
            return output.unflatten(self.dim, (-1, samples)), self.dim + 1
        return output.unflatten(self.dim, (samples, -1)), self.dim

    def flat(self, view: torch.Tensor) -> torch.Tensor:
        """Return an output out of such a view."""
        return view.flatten(self.dim, self.dim + 1)

    @property
    def scalar(self) -> bool:
        """Whether the output is one number for the whole batch."""
        return self.rule in (Rule.SAMPLES, Rule.TOKENS, Rule.SUM)


@dataclass(frozen=True, slots=True)
class Batch:
    """A call's arguments, flattened."""

    leaves: list[Any]
    spec: TreeSpec

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> Batch:
        """Flatten the arguments of a call."""
        return cls(*flatten((args, kwargs)))

    def call(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``(args, kwargs)`` with other leaves in the same places."""
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        return args, kwargs


@dataclass(frozen=True, slots=True)
class Layout:
    """What the probe found for one root and one structure of arguments."""

    dim: int
    """The batch dimension of the arguments."""
    batched: tuple[int, ...]
    """Which of the flattened arguments carry the batch."""
    joins: tuple[Join, ...]
    """A rule for each flattened output."""
    draws: bool = False
    """The forward draws random numbers."""
    updates: tuple[Place, ...] = field(default=(), compare=False)
    """What each call moves on in the model, whatever its samples."""
    kind: Any = field(default=None, compare=False, repr=False)
    """The kind of call that it is of (``layouts.CallKind``)."""

    def size(self, batch: Batch) -> int:
        """Return the samples in a call."""
        return int(batch.leaves[self.batched[0]].shape[self.dim])

    def select(self, batch: Batch, cut: Cut) -> list[Any]:
        """Return the arguments of some samples: views, or copies where those would have gaps."""
        leaves = list(batch.leaves)
        for index in self.batched:
            some = leaves[index].narrow(self.dim, cut[0], cut[1] - cut[0])
            leaves[index] = some.contiguous() if leaves[index].is_contiguous() else some
        return leaves

    def fits(self, batch: Batch) -> bool:
        """Return whether every batched argument has the same number of samples."""
        sizes = {
            tensor.shape[self.dim] if isinstance(tensor, torch.Tensor) and tensor.ndim else None
            for tensor in (batch.leaves[index] for index in self.batched)
        }
        return len(sizes) == 1 and None not in sizes

    def weights(self, join: Join, batch: Batch) -> Weights:
        """Return how much each sample counts in a scalar output that joins by ``join``."""
        if join.rule is Rule.SUM:
            return Weights(None)
        if join.labels is not None:
            return Weights(join.labels.counts(batch.leaves[join.labels.leaf], self.dim))
        return Weights([1] * self.size(batch))


@dataclass(frozen=True, slots=True)
class Weights:
    """What each sample counts in a mean, in samples or labels; ``None`` where they add up."""

    counts: Sequence[float] | None

    def of(self, cut: Cut) -> float:
        """Return the weight of a chunk's own mean in the mean of the whole.

        Zero where no label of the chunk counts: its own mean is 0/0 then, and must be left out.
        """
        if self.counts is None:
            return 1.0
        total = sum(self.counts)
        if not total:  # nothing counts: all chunks say the same, 0/0 or zero
            return (cut[1] - cut[0]) / len(self.counts)
        return sum(self.counts[cut[0] : cut[1]]) / total


def joined(join: Join, column: Sequence[Any], cuts: Sequence[Cut], weights: Sequence[float]) -> Any:
    """Return one output of the whole from those of its chunks.

    ``weights``: of each chunk, where ``join`` is scalar. Raises ``Refused`` where the parts do not
    fit together.
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
            raise Refused("the shape of the model's output differs between parts") from error
    if join.scalar:
        return _total(column, weights)
    first = column[0]
    if all(same(part, first) for part in column[1:]):
        return first
    raise Refused("what was the same for all parts of a batch depends on the samples now")


def _deferred(join: Join, column: Sequence[Any], cuts: Sequence[Cut]) -> Any:
    """Return outputs that wait for their use as one that waits, or computed where they cannot."""
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


def same(value: Any, expected: Any) -> bool:
    """Return whether two outputs, or attributes, are equal; NaN equals itself."""
    if isinstance(expected, torch.Tensor):
        return (
            isinstance(value, torch.Tensor)
            and value.shape == expected.shape
            and value.dtype == expected.dtype
            and bool(torch.allclose(value, expected, rtol=0.0, atol=0.0, equal_nan=True))
        )
    if type(value) is not type(expected):
        return False
    return bool(value == expected) or (value != value and expected != expected)


def cuts(start: int, stop: int, largest: int) -> list[Cut]:
    """Cut samples ``start`` to ``stop`` into the fewest even chunks of at most ``largest``."""
    size = stop - start
    count = -(-size // largest)
    bounds = [start + size * index // count for index in range(count + 1)]
    return list(pairwise(bounds))


def equal_cuts(size: int, largest: int) -> list[Cut]:
    """Cut ``size`` samples into chunks of one size of at most ``largest``.

    As even as may be, where that size would be less than half of ``largest``.
    """
    step = next(each for each in range(min(size, largest), 0, -1) if size % each == 0)
    if 2 * step < min(size, largest):
        return cuts(0, size, largest)
    return [(start, start + step) for start in range(0, size, step)]


def cuts_for_keeping(size: int, largest: int) -> list[Cut]:
    """Cut ``size`` samples so that the last chunk is as large as it may be, the others even.

    The last one's graph is kept, so that only the others are run again.
    """
    first = max(0, size - largest)
    return [*(cuts(0, first, largest) if first else []), (first, size)]
