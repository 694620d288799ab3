"""How a root's batch is split and its outputs are joined again.

A *layout* says which tensor arguments carry the batch and in which dimension, and by which rule
each output of the chunks becomes the output of the whole. The probe finds it; the bridge uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Cut = tuple[int, int]
"""A range of samples: the first, and the one after the last."""


class Rule(StrEnum):
    """How one output of the chunks becomes the output of the whole."""

    CONCATENATE = "concatenate"
    """Along ``dim``, one or more rows a sample."""
    SAMPLES = "samples"
    """A mean over samples: weighted by the chunk's share of the samples."""
    TOKENS = "tokens"
    """A mean over the labels that count: weighted by the chunk's share of those."""
    SUM = "sum"
    """A sum over samples."""
    SAME = "same"
    """Every chunk gives the same: a number, a string, ``None``."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The integer argument whose entries a mean loss counts (cross-entropy's ``target``)."""

    leaf: int
    """Position among the flattened arguments."""
    ignore_index: int
    shift: int
    """1 where the model drops each sample's first label (next-token prediction), else 0."""

    def counts(self, labels: torch.Tensor, dim: int) -> list[int]:
        """Return how many labels of each sample count; waits for the device once."""
        rows = labels.movedim(dim, 0)
        counted = rows if rows.ndim == 1 else rows[..., self.shift :]
        counts: list[int] = (counted != self.ignore_index).reshape(len(rows), -1).sum(1).tolist()
        return counts


@dataclass(frozen=True, slots=True)
class Join:
    """The rule for one output, and the dimension it joins along."""

    rule: Rule
    dim: int = 0

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
        return cls(*tree_flatten((args, kwargs)))

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
    labels: Labels | None = None
    """Set when a rule is ``TOKENS``."""
    draws: bool = False
    """The forward draws random numbers."""

    def size(self, batch: Batch) -> int:
        """Return the samples in a call."""
        return int(batch.leaves[self.batched[0]].shape[self.dim])

    def take(self, batch: Batch, cut: Cut) -> list[Any]:
        """Return the arguments of some samples: views, no copies."""
        leaves = list(batch.leaves)
        for index in self.batched:
            leaves[index] = leaves[index].narrow(self.dim, cut[0], cut[1] - cut[0])
        return leaves

    def fits(self, batch: Batch) -> bool:
        """Return whether every batched argument has the same number of samples."""
        sizes = {
            tensor.shape[self.dim] if isinstance(tensor, torch.Tensor) and tensor.ndim else None
            for tensor in (batch.leaves[index] for index in self.batched)
        }
        return len(sizes) == 1 and None not in sizes

    def weights(self, rule: Rule, batch: Batch) -> Weights:
        """Return how much each sample counts in a scalar output that joins by ``rule``."""
        if rule is Rule.SUM:
            return Weights(None)
        if rule is Rule.TOKENS:
            assert self.labels is not None
            return Weights(self.labels.counts(batch.leaves[self.labels.leaf], self.dim))
        return Weights([1] * self.size(batch))


@dataclass(frozen=True, slots=True)
class Weights:
    """What each sample counts in a mean, in samples or labels; ``None`` where they add up."""

    counts: list[int] | None

    def of(self, cut: Cut) -> float:
        """Return the weight of a chunk's own mean in the mean of the whole.

        Zero where no label of the chunk counts: its own mean is 0/0 then, and must be left out.
        """
        if self.counts is None:
            return 1.0
        total = sum(self.counts)
        return sum(self.counts[cut[0] : cut[1]]) / total if total else float("nan")


def cuts(start: int, stop: int, largest: int) -> list[Cut]:
    """Cut samples ``start`` to ``stop`` into the fewest even chunks of at most ``largest``."""
    size = stop - start
    count = -(-size // largest)
    bounds = [start + size * index // count for index in range(count + 1)]
    return list(pairwise(bounds))


def cuts_for_keeping(size: int, largest: int) -> list[Cut]:
    """Cut ``size`` samples so that the last chunk is as large as it may be, the others even.

    The last one's graph is kept, so that only the others are run again.
    """
    first = max(0, size - largest)
    return [*(cuts(0, first, largest) if first else []), (first, size)]
