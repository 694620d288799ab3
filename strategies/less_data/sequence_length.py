"""Shorter sequences: the model trains on the first half of each sample's tokens."""

from __future__ import annotations

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


class SequenceLength(Strategy):
    """Arguments with a dimension for tokens are cut in it, in calls with gradients.

    This is another training: dependencies on the later tokens are not learned (Press et al.,
    2021). The tokens are integers of shape ``(batch, tokens)``, as in Hugging Face's models.
    Masks and labels are cut in the same way. The model itself must return the loss. Half of a
    sample counts as half a sample in all figures.
    """

    name = "sequence_length"
    summary = "shorter sequences: the rest of the tokens is left out of training"
    source = "https://arxiv.org/abs/2012.15832"
    lowers = frozenset({Memory.ACTIVATIONS})
    levels = (
        Level(name=AS_IS, summary="the script's own sequences"),
        Level(
            name="half",
            summary="the first half of each sample's tokens",
            fidelity=Fidelity.RECIPE,
            keeps=0.5,
            refines=True,
        ),
    )

    def describe(self, level: str) -> str:
        """Return ``"half the tokens"``."""
        return "half the tokens"

    def share(self, level: str) -> float:
        """Return the share of each sample's tokens that remains."""
        return 1.0 if level == AS_IS else 0.5

    def by_hand(self, level: str) -> ByHand | None:
        """The script makes the batches."""
        setting = "cut each sample's tokens, mask and labels to their first half"
        return ByHand(setting=setting, part=ScriptPart.LOADER)

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Cut the arguments before any other level sees the call."""
        from autofit.strategies.less_data import arguments

        return root.around_whole(lambda call: arguments.trained_on(call, arguments.tokens))
