"""Computes the loss of a language model in chunks of tokens, without storing all logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autofit.exceptions import Refused
from autofit.facts import Facts
from autofit.strategies.base import (
    AS_IS,
    ByHand,
    Fidelity,
    Level,
    Memory,
    Replay,
    Root,
    ScriptPart,
    Setting,
    Strategy,
    Undo,
)
from autofit.strategies.inspection.heads import WIDE, find_head, share_of_logits

LIGER = (
    "TrainingArguments(use_liger_kernel=True), if liger-kernel is installed and knows the model;"
    " liger_kernel_config chooses its kernels"
)


class ChunkedLoss(Strategy):
    """Head and cross-entropy are computed together, a chunk of tokens at a time (Hsu et al., 2024).

    With a vocabulary of 100,000 words the logits are the largest tensor of a step, and several
    copies of them exist. Here the gradients of a chunk are computed at once, so nothing runs
    twice. If the script uses the logits elsewhere, such as in metrics, they are computed in
    full.

    The model itself must compute the cross-entropy from hidden states and one linear layer.
    Hugging Face's models with ``labels`` and nanoGPT do so.
    """

    name = "loss"
    summary = "head and cross-entropy in chunks of tokens: no logits of the whole batch"
    source = "https://arxiv.org/abs/2410.10989"
    lowers = frozenset({Memory.ACTIVATIONS})
    replays = True
    levels = (
        Level(name=AS_IS, summary="as the script has it"),
        Level(
            name="chunked",
            summary="gradients in forward, chunk by chunk",
            slowdown=0.98,
            keeps=0.6,
            refines=True,
            settings={"trainer": Setting(by_hand=LIGER)},
        ),
    )

    def expected_share(self, level: str, facts: Facts) -> float:
        """Chunks of logits take a tenth of their memory or less."""
        logits = share_of_logits(facts)
        if logits is None:
            return super().expected_share(level, facts)
        return 1.0 - 0.9 * logits

    def describe(self, level: str) -> str:
        """Return ``"chunked loss"``."""
        return f"{level} loss"

    def fidelity(self, level: str, facts: Facts | None = None) -> Fidelity:
        """Exact in float32. In lower precision the gradients of chunks are summed in float32."""
        if facts is None:
            return self.level(level).fidelity
        return Fidelity.ROUNDING if facts.rounds else Fidelity.EXACT

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """The model needs a wide head that is called by itself, and an unscaled loss."""
        if facts.scaler or any(root.dtype == "float16" for root in facts.roots):
            return "the loss is scaled after its gradients, which would underflow in float16"
        if any(root.compiled for root in facts.roots):
            return "the script compiles its model: one graph has no call of the head"
        if facts.roots and all(root.classes < WIDE for root in facts.roots):
            widest = max(root.classes for root in facts.roots)
            if not widest:
                return "the model has no linear layer at its end to compute together with the loss"
            return f"the model's last layer has only {widest} outputs: its logits are small"
        return None

    def clashes(self, level: str, levels: Mapping[str, str]) -> str | None:
        """It needs calls of the head, and gradients that do not underflow without loss scaling."""
        if levels.get("compile") in ("full", "budget"):
            return "a chunked loss needs the call of the head, which one graph does not have"
        if levels.get("precision") == "fp16":
            return "the loss is scaled after its gradients, which would underflow in fp16"
        return None

    def by_hand(self, level: str) -> ByHand:
        """Name a library's kernel that does the same."""
        setting = (
            "compute the loss by LigerFusedLinearCrossEntropyLoss of liger-kernel, from the hidden"
            " states and the head's weight"
        )
        return ByHand(setting=setting, part=ScriptPart.STEP)

    def replay(self, level: str, step: Replay) -> None:
        """Compute head and loss in chunks of tokens, and their gradients within forward."""
        from autofit.strategies.loss.chunks import chunked

        chunked(step)

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Make the head's output lazy."""
        from autofit.strategies.loss.lazy_logits import Watch

        module = root.module
        watch = Watch(_plain(find_head(module)), lambda: module.training)
        undo_head = root.around_call(watch.layer, watch.head)
        undo_root = root.around_forward(watch.root)

        def undo() -> None:
            undo_root()
            undo_head()

        return undo


def _plain(head: Any) -> Any:
    """Return ``head`` if it is a plain linear layer. Raises ``Refused`` otherwise."""
    from torch import nn

    if head is None:
        raise Refused("the model has no linear layer at its end that is wider than its input")
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks)
    if type(head) is not nn.Linear or "forward" in vars(head) or any(hooks):
        raise Refused("the model's last layer is not a plain linear layer")
    if type(head.weight) is not nn.Parameter:
        raise Refused("the weight of the model's last layer is not a plain parameter")
    return head
