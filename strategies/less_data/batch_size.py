"""A smaller batch: the model trains on the first half or quarter of the samples."""

from __future__ import annotations

from autofit.facts import Facts
from autofit.strategies.base import (
    AS_IS,
    ByHand,
    Fidelity,
    Level,
    Memory,
    Root,
    ScriptPart,
    Strategy,
    Undo,
)

PARTS = {"half": 2, "quarter": 4}
"""Each level's divisor of the number of samples."""


class BatchSize(Strategy):
    """Each call of the model with gradients gets only the first samples of its batch.

    This is another training: gradients are noisier, and the learning rate is not adapted
    (McCandlish et al., 2018). The model itself must return the loss. A loss that the script
    computes would compare some outputs with all labels. Evaluation sees the whole batch.
    """

    name = "batch_size"
    summary = "a smaller batch: the rest of the samples is left out of training"
    source = "https://arxiv.org/abs/1812.06162"
    lowers = frozenset({Memory.ACTIVATIONS})
    replays = True
    levels = (
        Level(name=AS_IS, summary="the script's own batch"),
        Level(
            name="half",
            summary="the first half of each batch",
            fidelity=Fidelity.RECIPE,
            slowdown=1.03,
            keeps=0.5,
            refines=True,
        ),
        Level(
            name="quarter",
            summary="the first quarter of each batch",
            fidelity=Fidelity.RECIPE,
            slowdown=1.1,
            keeps=0.25,
            refines=True,
        ),
    )

    def describe(self, level: str) -> str:
        """Return ``"half the batch"``."""
        return f"{'half' if level == 'half' else 'a quarter of'} the batch"

    def samples(self, level: str, batch: int) -> int:
        """Return how many samples remain, at least one."""
        return batch if level == AS_IS else -(-batch // PARTS[level])

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """The batch must have enough samples."""
        if not facts.roots:
            return None
        if all((root.batch or 1) < PARTS[level] for root in facts.roots):
            return f"the model sees fewer than {PARTS[level]} samples at a time"
        return None

    def by_hand(self, level: str) -> ByHand | None:
        """The script makes the loader."""
        setting = f"make the training DataLoader with one {level} of its batch_size"
        return ByHand(setting=setting, part=ScriptPart.LOADER)

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Cut the arguments before any other level sees the call."""
        from autofit.strategies.less_data import arguments

        return root.around_whole(
            lambda call: arguments.trained_on(
                call, lambda leaves: arguments.samples(leaves, self, level)
            )
        )
