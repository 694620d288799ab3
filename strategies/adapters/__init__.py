"""Adapters: small trainable matrices beside linear layers whose own weights are frozen."""

from __future__ import annotations

from importlib.util import find_spec

from autofit.facts import Facts, Hardware
from autofit.strategies.base import (
    AS_IS,
    ByHand,
    Fidelity,
    Level,
    Memory,
    OptimizerHandle,
    Root,
    ScriptPart,
    Strategy,
    Undo,
)

RANK = 16
"""Rank of the adapters' matrices. Their product is multiplied by ``ALPHA / RANK``."""
ALPHA = 32


class Adapters(Strategy):
    """LoRA in the linear layers of the repeated blocks (Hu et al., 2021), by peft.

    This is another training: all weights of the model are frozen, and the optimizer steps the
    adapters. Each adapter has the optimizer settings of its layer's weight. Under ``qlora``
    bitsandbytes keeps the frozen weights of these layers in 4 bits (NF4; Dettmers et al.,
    2023). The model is changed in place, and its ``state_dict`` has peft's names.
    """

    name = "adapters"
    summary = "the weights are frozen, small matrices beside them are trained (LoRA)"
    source = "https://arxiv.org/abs/2106.09685"
    lowers = frozenset({Memory.WEIGHTS, Memory.GRADIENTS, Memory.OPTIMIZER_STATE})
    freezes = True
    levels = (
        Level(name=AS_IS, summary="all that the script trains"),
        Level(
            name="lora",
            summary=f"LoRA of rank {RANK} in the blocks' linear layers",
            fidelity=Fidelity.RECIPE,
            slowdown=1.08,
            keeps=0.05,
            lowers=frozenset({Memory.GRADIENTS, Memory.OPTIMIZER_STATE}),
            undo=False,
            refines=True,
        ),
        Level(
            name="qlora",
            summary="the same beside weights in 4 bits",
            fidelity=Fidelity.RECIPE,
            slowdown=1.2,
            keeps=0.2,
            undo=False,
            refines=True,
        ),
    )

    def describe(self, level: str) -> str:
        """Return ``"LoRA"`` or ``"QLoRA"``."""
        return {"lora": "LoRA", "qlora": "QLoRA"}.get(level, self.name)

    def unavailable(self, level: str, hardware: Hardware) -> str | None:
        """Both need peft, 4 bits need bitsandbytes."""
        needed = {"lora": ("peft",), "qlora": ("peft", "bitsandbytes")}.get(level, ())
        missing = next((name for name in needed if find_spec(name) is None), None)
        return f"{missing} is not installed: pip install {missing}" if missing else None

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """The model needs repeated blocks, and one process must train it."""
        if not facts.roots:
            return None
        if not any(root.blocks for root in facts.roots):
            return "the model has no repeated blocks"
        if facts.world_size > 1:
            return "with several ranks, gradients are reduced for the script's own parameters"
        if any(root.compiled for root in facts.roots):
            return "the script compiles the model, whose layers would be replaced"
        return None

    def by_hand(self, level: str) -> ByHand | None:
        """Insert adapters before the optimizer is created. 4 bits take more than a few lines."""
        if level != "lora":
            return None
        return ByHand(
            setting=f"call peft.inject_adapter_in_model(peft.LoraConfig(r={RANK},"
            f" lora_alpha={ALPHA}, target_modules=NAMES), model) with the NAMES of its linear"
            " layers",
            part=ScriptPart.MODEL,
            prepare=f"""
            from peft import LoraConfig, inject_adapter_in_model

            linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
            lora = LoraConfig(r={RANK}, lora_alpha={ALPHA}, target_modules=linear)
            inject_adapter_in_model(lora, model)
            # in float32 where the model is in half precision; and make the optimizer of them
            """,
        )

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Insert the adapters, once."""
        from autofit.strategies.adapters import lora

        lora.inject(root.module, four_bit=level == "qlora")
        return None

    def on_optimizer(self, level: str, handle: OptimizerHandle) -> Undo | None:
        """Let the script's optimizer step the adapters."""
        from autofit.strategies.adapters import lora

        lora.take_over(handle)
        return None
