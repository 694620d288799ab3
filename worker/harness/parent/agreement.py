"""How the ranks of a launch agree, through their parent. Imports no torch.

Every rank runs the same trial and decides on the same figures: those of the slowest rank, or of the
one with the largest peak. A rank sends its own figures and receives those of all. If a rank ends,
the parent ends the others (``group.py``), so that none waits forever. A single rank sends nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autofit.exceptions import WorkerError
from autofit.facts import RootFacts
from autofit.worker.harness.parent.pipe import Reporter
from autofit.worker.meter import Peak
from autofit.worker.records.trials import Agreeing, OutOfMemory

T = TypeVar("T")


class Peers:
    """The ranks of the launch, as seen by one of them."""

    def __init__(self, reporter: Reporter, ranks: int) -> None:
        self.ranks = ranks
        self.leads = reporter.rank == 0
        """This rank reports to the parent what is the same for all."""
        self._reporter = reporter

    @property
    def alone(self) -> bool:
        """Whether this is the only rank."""
        return self.ranks == 1

    def agree(self, what: str, value: T, patience: float | None = None) -> tuple[T, ...]:
        """Return every rank's value, in the order of the ranks, once all have reached ``what``.

        Returns an empty tuple if they do not within ``patience`` seconds. Raises ``WorkerError`` if
        another rank waits for something else.
        """
        if self.alone:
            return (value,)
        said = self._reporter.agree(Agreeing(what=what, value=value), patience)
        if len({each.what for each in said}) > 1:
            where = ", ".join(f"rank {rank} is at {each.what}" for rank, each in enumerate(said))
            raise WorkerError(f"the ranks do not do the same: {where}")
        values: tuple[T, ...] = tuple(each.value for each in said)  # type: ignore[misc]
        return values


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank, or all ranks, measured in an optimizer step."""

    seconds: float
    wait: float
    """Seconds spent waiting for data."""
    losses: tuple[float, ...]
    calls: int
    """Calls of the first root."""
    proven: bool
    """A check ran in the step."""
    compiled: bool
    """The step compiled something."""
    shortage: OutOfMemory | None

    @classmethod
    def by_all(cls, ranks: Sequence[Seen]) -> Seen:
        """Return the combined step: the slowest rank, the first shortage, the mean losses."""
        if len(ranks) == 1:
            return ranks[0]
        losses = itertools.zip_longest(*(rank.losses for rank in ranks))
        present = ([loss for loss in each if loss is not None] for each in losses)
        return cls(
            seconds=max(rank.seconds for rank in ranks),
            wait=max(rank.wait for rank in ranks),
            losses=tuple(sum(each) / len(each) for each in present),
            calls=max(rank.calls for rank in ranks),
            proven=any(rank.proven for rank in ranks),
            compiled=any(rank.compiled for rank in ranks),
            shortage=next((rank.shortage for rank in ranks if rank.shortage), None),
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """What one rank measured under one plan at one micro-batch size."""

    peak: Peak
    retries: int
    """Steps in which the allocator emptied its cache."""
    refused: int
    """Allocations that were refused."""
    compiled: float
    """Seconds spent compiling."""
    pressed: bool
    """The allocator emptied its cache in two steps in a row."""


def common(ranks: Sequence[RootFacts]) -> tuple[RootFacts, float]:
    """Return the facts of a root that all ranks use, and the mean batch relative to the largest.

    The batch is the largest one: a plan that fits on that rank fits on all.
    """
    batches = [rank.batch for rank in ranks]
    known = [batch for batch in batches if batch]
    if len(known) < len(batches):
        return replace(ranks[0], batch=None), 1.0
    largest = max(known)
    return replace(ranks[0], batch=largest), sum(known) / len(known) / largest
