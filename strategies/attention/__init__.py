"""Fused attention kernels, which need no matrix of all pairs of tokens."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from autofit.exceptions import Refused
from autofit.facts import Facts, Hardware
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
from autofit.strategies.precision import AMPERE

EAGER, SDPA = "eager", "sdpa"
"""Hugging Face's names for unfused attention, and for torch's kernels."""
FLASH = "flash"
CUDNN_FIRST = ((9, 0), (10, 0))
"""Compute capabilities on which torch 2.11 and later prefer cuDNN's kernel to FlashAttention."""
WRITTEN = "the model is not a Hugging Face model with eager attention"
CAPS = ("attn_logit_softcapping",)
"""Settings of models that torch's kernels would silently ignore."""


class Attention(Strategy):
    """Fused attention where a model writes it out, or another of torch's fused kernels.

    Attention that is written out holds a score for every pair of tokens and every head. The
    fused kernels never hold these scores (Dao et al., 2022). A Hugging Face model is switched
    by its own method. Under ``flash`` torch tries FlashAttention first, and other kernels where
    that one does not work. Dropout inside attention draws other numbers from the same
    distribution.
    """

    name = "attention"
    summary = "attention in one kernel, without the matrix of all pairs of tokens"
    source = "https://arxiv.org/abs/2205.14135"
    lowers = frozenset({Memory.ACTIVATIONS})
    redraws = True
    levels = (
        Level(name=AS_IS, summary="as the script has it"),
        Level(
            name="sdpa",
            summary="torch's fused attention where a Hugging Face model writes it out",
            fidelity=Fidelity.ROUNDING,
            slowdown=0.85,
            keeps=0.7,
            refines=True,
        ),
        Level(
            name=FLASH,
            summary="FlashAttention before torch's other kernels, for half precision",
            fidelity=Fidelity.ROUNDING,
            slowdown=0.98,
            refines=True,
        ),
    )

    def describe(self, level: str) -> str:
        """Return ``"flash attention"``."""
        return f"{level} attention"

    def unavailable(self, level: str, hardware: Hardware) -> str | None:
        """FlashAttention needs CUDA and Ampere. torch prefers it already on most devices."""
        if level != FLASH:
            return None
        if hardware.device != "cuda":
            return "flash attention needs a CUDA device"
        capability = hardware.capability or (0, 0)
        if capability < AMPERE:
            return f"flash attention needs compute capability 8.0, {hardware.name} has less"
        if capability not in CUDNN_FIRST:
            return f"torch prefers flash attention on {hardware.name} by itself"
        return None

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """A script that chose a kernel keeps it. ``sdpa`` needs a model with eager attention."""
        if not facts.roots:
            return None
        kinds = {root.attention for root in facts.roots if root.attention is not None}
        if others := sorted(kinds - {EAGER, SDPA}):
            return f"the script has chosen its attention: {others[0]}"
        if level == "sdpa" and EAGER not in kinds:
            return WRITTEN
        if not kinds:
            return "the model is no Hugging Face model that is known to call torch's kernels"
        if level == FLASH and all(root.dtype == "float64" for root in facts.roots):
            return "flash attention is for half precision"
        return None

    def by_hand(self, level: str) -> ByHand:
        """Switch a Hugging Face model, or select torch's kernel."""
        if level == "sdpa":
            return ByHand(
                setting='call set_attn_implementation("sdpa") of the Hugging Face model',
                part=ScriptPart.MODEL,
                prepare="""
                for each in model.modules():
                    if hasattr(each, "set_attn_implementation"):
                        each.set_attn_implementation("sdpa")
                """,
            )
        kernels = ", ".join(
            f"torch.nn.attention.SDPBackend.{each}"
            for each in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
        )
        around = f"torch.nn.attention.sdpa_kernel([{kernels}], set_priority=True)"
        setting = f"call the model inside {around}"
        return ByHand(setting=setting, part=ScriptPart.STEP, around=around)

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Switch a model with eager attention, then prefer the kernel."""
        with ExitStack() as stack:
            config = getattr(root.module, "config", None)
            if getattr(config, "_attn_implementation", None) == EAGER:
                stack.callback(_switch(root.module))
            elif level == "sdpa":
                raise Refused(WRITTEN)
            if level == FLASH:
                from autofit.strategies.attention.kernels import FirstForward, preferring_flash

                stack.enter_context(preferring_flash())
                first = FirstForward(root.module)
                stack.callback(root.around_forward(first.around))
            return stack.pop_all().close
        raise AssertionError("the stack swallows nothing")


def _switch(model: Any) -> Undo:
    """Let a Hugging Face model use torch's kernels. Return the undo."""
    configs = list(_configs(model).values())
    if name := next((n for n in CAPS for each in configs if getattr(each, n, None)), None):
        raise Refused(f"torch's kernels do not implement the model's {name}")
    if any(getattr(each, "output_attentions", False) for each in configs):
        raise Refused(
            "the model returns its attention weights, which torch's kernels do not compute"
        )
    before = [(each, each._attn_implementation_internal) for each in configs]

    def undo() -> None:
        for each, implementation in before:
            each._attn_implementation_internal = implementation

    try:
        model.set_attn_implementation(SDPA)
    except ValueError as error:
        undo()
        raise Refused(f"this model has no SDPA attention: {str(error).splitlines()[0]}") from None
    if model.config._attn_implementation != SDPA:
        undo()
        raise Refused("this model offers no choice of attention kernels")
    return undo


def _configs(model: Any) -> dict[int, Any]:
    """Return the configurations of a Hugging Face model and its parts by ``id``."""
    found: dict[int, Any] = {}
    todo = [vars(each).get("config") for each in model.modules()]
    while todo:
        config = todo.pop()
        if id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            todo += [getattr(config, name, None) for name in config.sub_configs]
    return found
