"""Runs the model on chunks of the batch. The training loop stays as it is."""

from __future__ import annotations

from autofit.facts import Facts
from autofit.strategies.base import (
    AS_IS,
    AUTO,
    ByHand,
    Fidelity,
    Level,
    Memory,
    Number,
    Root,
    ScriptPart,
    Strategy,
    Undo,
)


class MicroBatch(Strategy):
    """Each call of the model runs in chunks of at most the given number of samples.

    Besides the levels listed, every positive integer is a level: the samples of the largest
    chunk. A search uses ``auto`` and stores the size that it finds. The gradients are those of
    the whole batch (Huang et al., 2019). An optimizer step sees the same samples as before.
    """

    name = "micro_batch"
    summary = "the model sees the batch in chunks; the optimizer sees the same batch as before"
    source = "https://arxiv.org/abs/1811.06965"
    lowers = frozenset({Memory.ACTIVATIONS})
    replays = True
    number = Number.SAMPLES
    levels = (
        Level(name=AS_IS, summary="the script's own batch in one piece"),
        Level(
            name=AUTO,
            summary="the fastest size that fits, found inside one launch",
            slowdown=1.02,
        ),
    )

    def numbered(self, name: str) -> Level:
        """Return the level of a number of samples."""
        return Level(name=name, summary=f"chunks of at most {int(name)} samples")

    def leaner_levels(self, level: str, facts: Facts) -> tuple[str, ...]:
        """Return half the samples of a chunk, if they are known and there are several."""
        size = int(level) if level.isdecimal() else facts.batch
        return (str(-(-size // 2)),) if size is not None and size > 1 else ()

    def fidelity(self, level: str, facts: Facts | None = None) -> Fidelity:
        """Exact. If the model has dropout and its batch is split, random draws differ."""
        found = self.level(level).fidelity
        if facts is None or not any(root.dropout for root in facts.roots):
            return found
        sizes = [root.batch for root in facts.roots]
        uncut = level.isdecimal() and all(each and each <= int(level) for each in sizes)
        return found if uncut else Fidelity.REDRAW

    def describe(self, level: str) -> str:
        """Return ``"micro 8"``."""
        return f"micro {level}"

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """BatchNorm's statistics depend on the batch, and one sample cannot be split."""
        if any(root.batch_norm for root in facts.roots):
            return "BatchNorm in training mode: the statistics of a split batch differ"
        for root in facts.roots:
            if root.unsplittable:
                return root.unsplittable
        if facts.called and all(root.batch is None for root in facts.roots):
            return "no tensor argument of the model has a dimension that looks like a batch"
        if facts.called and all((root.batch or 1) < 2 for root in facts.roots):
            return "the model gets one sample at a time already"
        return None

    def by_hand(self, level: str) -> ByHand | None:
        """Split the batch in the training step. ``auto`` has no size yet."""
        if level == AUTO:
            return None
        setting = (
            f"call the model on at most {level} samples at once, call backward on each loss times"
            " its share of the batch, and step once"
        )
        return ByHand(setting=setting, part=ScriptPart.STEP, samples=int(level))

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Split the root's calls. A number has replaced ``auto`` before."""
        return root.split(int(level))
