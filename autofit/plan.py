"""A plan: one level for every strategy. Frozen, hashable, JSON both ways; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from autofit import strategies
from autofit.exceptions import UsageError
from autofit.strategies import (
    AS_IS,
    AUTO,
    Facts,
    Fidelity,
    Memory,
    Number,
    Strategy,
    Waste,
    counting,
)
from autofit.strategies.base import Shards
from autofit.strategies.support.block_levels import ALL


@dataclass(frozen=True, slots=True)
class Plan:
    """One level for every strategy; a strategy that is not named has the level ``as_is``.

    :meth:`of` creates a plan. It checks names and sorts them as the registry does, so equal plans
    compare and hash equal::

        Plan.of({"precision": "bf16", "micro_batch": "8"})
    """

    changes: tuple[tuple[str, str], ...] = ()
    """``(strategy, level)`` for every strategy that is not ``as_is``."""

    @classmethod
    def of(cls, levels: Mapping[str, str]) -> Self:
        """Return the plan with these levels.

        Raises ``UsageError`` for an unknown name, or if ``levels`` is no table.

        >>> print(Plan.of({"micro_batch": "8", "precision": "bf16"}))
        bf16, micro 8
        """
        if not isinstance(levels, Mapping) or not all(isinstance(n, str) for n in levels.values()):
            raise UsageError(
                f"a plan is a table of techniques and their levels, not {levels!r:.60}"
            )
        for name, level in levels.items():
            strategies.get(name).level(level)
        return cls(
            tuple(
                (name, levels[name])
                for name in strategies.NAMES
                if levels.get(name, AS_IS) != AS_IS
            )
        )

    @property
    def levels(self) -> dict[str, str]:
        """The level of every strategy, as a dictionary."""
        return dict.fromkeys(strategies.NAMES, AS_IS) | dict(self.changes)

    @property
    def neutral(self) -> bool:
        """Whether this plan changes nothing."""
        return not self.changes

    def __getitem__(self, name: str) -> str:
        return dict(self.changes).get(name, AS_IS)

    def __iter__(self) -> Iterator[tuple[Strategy, str]]:
        """Yield each changed strategy and its level, in the order in which they are applied."""
        return ((strategies.get(name), level) for name, level in self.changes)

    def replace(self, **levels: str) -> Self:
        """Return this plan with some levels changed.

        >>> print(Plan.of({"precision": "bf16"}).replace(precision="as_is", checkpointing="all"))
        checkpointing
        """
        return self.of(self.levels | levels)

    def with_number(self, number: Number, level: str) -> Self:
        """Return this plan with ``level`` as what it says of a ``number``: ``as_is`` for none."""
        return self.replace(**{counting(number).name: level})

    def level_of(self, number: Number) -> str:
        """Return what this plan says of a ``number``: itself, ``auto``, ``as_is`` or a name."""
        return self[counting(number).name]

    @property
    def splits(self) -> bool:
        """Whether the model sees the batch in chunks, of a given size or of one to be found."""
        return self.level_of(Number.SAMPLES) != AS_IS

    @property
    def chunk(self) -> int | None:
        """The samples in the largest chunk; ``None`` for the whole batch, or if to be found."""
        level = self.level_of(Number.SAMPLES)
        return int(level) if level.isdecimal() else None

    @property
    def blocks(self) -> str:
        """Which repeated blocks run again in backward: a level, such as ``"all"`` or ``"7"``."""
        return self.level_of(Number.BLOCKS)

    @property
    def ranks(self) -> int:
        """Number of processes that a single-process script is run as."""
        level = self.level_of(Number.RANKS)
        return 1 if level == AS_IS else int(level)

    @property
    def shards(self) -> Shards | None:
        """How it shards what ranks would hold alike; ``None`` if it does not."""
        return next((found for s, level in self if (found := s.level(level).shards)), None)

    @property
    def divides(self) -> bool:
        """Whether it divides the batch or the weights: sums are then added in another order."""
        return self.splits or self.ranks > 1 or self.shards is not None

    @property
    def autocast(self) -> str | None:
        """The dtype in which autocast computes the forward, by torch's name; ``None``: as it is."""
        return next((found for s, level in self if (found := s.level(level).autocast)), None)

    @property
    def compiles(self) -> bool:
        """Whether code is made for the model before its first step."""
        return any(strategy.level(level).setup_seconds for strategy, level in self)

    def fidelity(self, facts: Facts | None = None) -> Fidelity:
        """Return the highest fidelity among the levels of this plan."""
        return max(
            (strategy.fidelity(level, facts) for strategy, level in self), default=Fidelity.EXACT
        )

    def samples(self, batch: int) -> int:
        """Return how many of the ``batch`` samples of a call train under this plan."""
        for strategy, level in self:
            batch = strategy.samples(level, batch)
        return batch

    def effective_batch(self, facts: Facts) -> int:
        """Return the samples in one optimizer step over all ranks.

        Shortened samples count in part. The result is 1 if the batch is unknown.
        """
        if facts.batch is None:
            return 1
        samples = self.samples(facts.batch) * facts.calls_per_step * facts.world_size
        share = math.prod(strategy.share(level) for strategy, level in self)
        return max(1, round(samples * share))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that must be set before the process starts."""
        return {key: value for s, level in self for key, value in s.environment(level).items()}

    @property
    def fixed(self) -> Self:
        """The levels that a running process cannot remove.

        Plans with the same such levels can be measured one after another in one launch.
        """
        return type(self)(tuple((s.name, level) for s, level in self if not s.level(level).undo))

    @property
    def at_start(self) -> Self:
        """The levels that a process must be started with, because they act before the model exists.

        A process that was prepared with these levels can measure the plan.
        """
        return type(self)(tuple((s.name, level) for s, level in self if s.acts_at_start(level)))

    @property
    def alone(self) -> bool:
        """Whether it must be the first plan of its process, and the last."""
        return any(strategy.level(level).alone for strategy, level in self)

    def follows(self, fixed: Plan) -> bool:
        """Return whether a launch whose plans have the levels ``fixed`` can measure this plan.

        The plan must have exactly these levels, of those that a running process cannot remove.
        """
        return self.fixed == fixed.fixed

    def whole(self, facts: Facts) -> Self:
        """Return this plan without a micro-batch size that cuts no call of the script.

        A search may find that the whole batch in one chunk is fastest. The plan stays the same if
        one of its levels needs a split, or if a batch is unknown.
        """
        size = self.chunk
        sizes = [root.batch for root in facts.roots]
        if size is None or not sizes:
            return self
        if any(each is None or self.samples(each) > size for each in sizes):
            return self
        plain = self.with_number(Number.SAMPLES, AS_IS)
        levels = plain.levels
        return self if any(each.clashes(level, levels) for each, level in plain) else plain

    def without(self, name: str) -> Self:
        """Return this plan without a strategy, and without those that clash with the rest then."""
        plan = self.replace(**{name: AS_IS})
        lost = [s.name for s, level in plan if s.clashes(level, plan.levels)]
        return plan.replace(**dict.fromkeys(lost, AS_IS))

    def without_remedy(self, waste: Waste) -> Self:
        """Return this plan without the levels that lower ``waste``."""
        return type(self)(tuple((s.name, n) for s, n in self if s.remedies is not waste))

    @property
    def in_calls(self) -> Self:
        """The levels that change calls of the model: no split, and nothing of optimizers.

        ``split_check`` verifies how levels divide the batch or the weights.
        """
        divided = (Number.SAMPLES, Number.RANKS)
        touching = (
            (s.name, level)
            for s, level in self
            if s.changes_models and s.number not in divided and s.level(level).shards is None
        )
        return type(self)(tuple(touching))

    @property
    def unsized(self) -> Self:
        """This plan without levels that are made for one batch size, such as ``compile``."""
        return type(self)(tuple((s.name, level) for s, level in self if not s.sized))

    @property
    def sized_keeps(self) -> float:
        """Expected share of the activations that levels made for one batch size leave."""
        lowering = (s.level(n) for s, n in self if s.sized and Memory.ACTIVATIONS in s.lowered(n))
        return math.prod(level.keeps for level in lowering)

    @property
    def searched(self) -> Self:
        """This plan with its numbers left open for a trial to find.

        These are the micro-batch size and the number of checkpointed blocks.
        """
        return type(self)(tuple((s.name, s.searched(level)) for s, level in self))

    @property
    def all_blocks(self) -> Self:
        """This plan with all blocks checkpointed in place of a number of them."""
        return self.with_number(Number.BLOCKS, ALL) if self.blocks.isdecimal() else self

    @property
    def open(self) -> bool:
        """Whether a trial has to find a number of this plan."""
        return any(level == AUTO for _, level in self.changes)

    def refuse_open(self) -> None:
        """Raise ``UsageError`` if a trial has to find a number of this plan."""
        for strategy, level in self:
            if level == AUTO:
                raise UsageError(
                    f"{strategy.name} auto: only a search can find the number; give one, such as 8"
                )

    def sized(self, micro_batch: int, checkpointing: str | None) -> Self:
        """Return this plan with the given numbers in place of ``auto``.

        ``checkpointing``: a level of that strategy; ``None`` if it was not measured.
        """
        numbers = {Number.SAMPLES: str(micro_batch), Number.BLOCKS: checkpointing or AUTO}
        return self.of(
            {
                s.name: numbers[s.number] if s.number and level == AUTO else level
                for s, level in self
            }
        )

    def is_point_of(self, plan: Plan) -> bool:
        """Return whether this plan is ``plan`` with numbers in place of ``auto``.

        >>> Plan.of({"micro_batch": "8"}).is_point_of(Plan.of({"micro_batch": "auto"}))
        True
        """
        opened = {name: AUTO for name, level in plan.changes if level == AUTO}
        return self.replace(**opened) == plan

    def __str__(self) -> str:
        return ", ".join(s.describe(level) for s, level in self) or "as it is"
