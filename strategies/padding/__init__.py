"""Does not compute padding at the end of a batch that all samples share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autofit.facts import Facts
from autofit.strategies.base import AS_IS, ByHand, Fidelity, Level, Root, ScriptPart, Strategy, Undo

WORTH = 0.05
"""Minimum share of padding in the first batch."""


class Padding(Strategy):
    """The common padding of a batch is removed where the model is called.

    This has the effect of a collator that pads each batch to its longest sample. The order of
    the samples stays the same. The tokens after the last one that ``attention_mask`` or
    ``labels`` uses are removed, in multiples of eight. Outputs for each token are delayed. A
    script that uses them gets them in full and pays for a second forward.

    The memory of most batches becomes lower, but not that of the longest one.
    """

    name = "padding"
    summary = "tokens that all samples of a batch mask at their end are not computed"
    source = "https://huggingface.co/docs/transformers/main_classes/data_collator"
    levels = (
        Level(name=AS_IS, summary="each batch as long as the script pads it"),
        Level(
            name="trimmed",
            summary="to the longest sample of each batch, or of each part of one",
            slowdown=0.95,
            refines=True,
        ),
    )

    def describe(self, level: str) -> str:
        """Return ``"trimmed padding"``."""
        return f"{level} padding"

    def fidelity(self, level: str, facts: Facts | None = None) -> Fidelity:
        """Exact. With dropout the random draws differ, because fewer values are dropped."""
        if facts is None or not any(root.dropout for root in facts.roots):
            return Fidelity.EXACT
        return Fidelity.REDRAW

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """The batch needs a mask with zeros at the end. The model may be called once more."""
        if not facts.roots:
            return None
        if any(root.compiled for root in facts.roots):
            return "the script compiles its model, which would be compiled anew for each length"
        if any(root.batch_norm for root in facts.roots):
            return "BatchNorm in training mode counts padding in its statistics"
        if all(root.padding < WORTH for root in facts.roots):
            return "the attention_mask of the first batch shows almost no padding"
        return None

    def clashes(self, level: str, levels: Mapping[str, str]) -> str | None:
        """Each length would need its own compiled graph."""
        if levels.get("compile", AS_IS) != AS_IS:
            return "batches have many lengths, and the model would be compiled anew for each"
        return None

    def by_hand(self, level: str) -> ByHand:
        """The collator pads."""
        collator = "transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)"
        setting = f"pad each batch to its longest sample: collate_fn={collator}"
        return ByHand(setting=setting, part=ScriptPart.LOADER)

    def checkable_call(self, level: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the call with the last quarter of each sample masked."""
        from autofit.strategies.padding.trim import masked

        return args, masked(kwargs)

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Trim each forward in training. Evaluation is not changed."""
        from autofit.strategies.padding.trim import Trimming

        return root.around_forward(Trimming(root).wrap)
