"""Weights in bfloat16, with or without the low bits of float32 beside them."""

from __future__ import annotations

from collections.abc import Mapping

from autofit.facts import Facts, Hardware
from autofit.strategies.base import (
    AS_IS,
    ByHand,
    Fidelity,
    Level,
    Memory,
    OptimizerHandle,
    ProcessHandle,
    Root,
    ScriptPart,
    Strategy,
    Undo,
)
from autofit.strategies.precision import AMPERE, autocast

SHARDING = "sharding"
IN_BF16 = {"precision": "bf16"}
"""Its levels enter this autocast themselves."""
OF_TYPES = ("dtype", "scalar type", "BFloat16")
"""Words in torch's errors about an operation on tensors of different dtypes."""


class BF16Weights(Strategy):
    """The model's float32 parameters hold bfloat16; the parameter objects stay the same.

    Under ``bf16_master`` the 16 low bits of each float32 weight are stored beside the weight. A
    step of the optimizer joins both halves, so the update is computed in float32 (Micikevicius
    et al., 2018; Kalamkar et al., 2019). Gradients take half the bytes. Checkpoints are
    float32.

    Under ``bf16`` nothing is stored beside the weights. Weights and optimizer state are rounded
    stochastically after each step (Zamirai et al., 2020). Checkpoints are bfloat16.

    The forward runs under autocast, because models create float32 tensors of their own.

    Under ``sharding`` the ranks keep float32 weights in parts, and gather them in bfloat16. Then
    gradients are summed and stored in float32. The check of the plan runs before the weights are
    sharded, with autocast alone.

    A model that does not fit in float32 is created in bfloat16. It cannot run plainly then, so
    the rest of the plan is compared with the model in bf16 under autocast. What bf16 itself
    changes is not compared.
    """

    name = "weights"
    summary = "the model's weights and gradients in bfloat16"
    source = "https://arxiv.org/abs/1905.12322"
    lowers = frozenset(
        {Memory.WEIGHTS, Memory.GRADIENTS, Memory.OPTIMIZER_STATE, Memory.ACTIVATIONS}
    )
    levels = (
        Level(name=AS_IS, summary="float32, as the script has them"),
        Level(
            name="bf16_master",
            summary="bf16 for forward and backward, the update in float32",
            fidelity=Fidelity.ROUNDING,
            slowdown=1.5,
            keeps=0.55,
            lowers=frozenset({Memory.GRADIENTS, Memory.ACTIVATIONS}),
            made=0.5,
            refines=True,
            implies=IN_BF16,
        ),
        Level(
            name="bf16",
            summary="bf16 throughout, rounded stochastically; what is saved is bf16",
            fidelity=Fidelity.RECIPE,
            slowdown=1.12,
            keeps=0.5,
            made=0.5,
            undo=False,
            implies=IN_BF16,
            refines=True,
        ),
    )

    def keeps(self, level: str, kind: Memory, levels: Mapping[str, str]) -> float:
        """``optimizer_offload`` moves the low bits to host memory with the optimizer state.

        ``sharding`` keeps float32 gradients.
        """
        if level == "bf16_master" and kind is Memory.GRADIENTS and SHARDING in levels:
            return super().keeps(level, kind, levels) if levels[SHARDING] == AS_IS else 1.0
        if level == "bf16_master" and kind is Memory.WEIGHTS:
            return 1.0 if levels.get("optimizer_offload", AS_IS) == AS_IS else 0.5
        return super().keeps(level, kind, levels)

    def describe(self, level: str) -> str:
        """Return ``"bf16 weights"``, or ``"bf16 weights with masters"``."""
        return "bf16 weights with masters" if level == "bf16_master" else "bf16 weights"

    def unavailable(self, level: str, hardware: Hardware) -> str | None:
        """On CUDA bfloat16 needs a GPU from Ampere on."""
        if hardware.capability is not None and hardware.capability < AMPERE:
            return f"bf16 needs compute capability 8.0, {hardware.name} has less"
        return None

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """The weights must be float32, trained by one process without loss scaling."""
        dtypes = {root.dtype for root in facts.roots}
        if dtypes and dtypes != {"float32"}:
            return f"the model's weights are {', '.join(sorted(dtypes))}, not float32"
        if facts.world_size > 1:
            return "with several ranks, gradients are reduced for the script's own parameters"
        if facts.scaler:
            return "the script scales its loss, which bf16 does not need"
        if facts.autograd_grad and level == "bf16_master":
            return "the script calls torch.autograd.grad: weights that it computes would be rounded"
        if "LBFGS" in facts.optimizers:
            return "LBFGS calls the model within its step"
        return None

    def clashes(self, level: str, levels: Mapping[str, str]) -> str | None:
        """The level uses bf16 autocast, so no other precision can be combined with it."""
        precision = levels.get("precision", AS_IS)
        if precision not in (AS_IS, "bf16"):
            return f"the weights are bf16, so {precision} has nothing to do"
        return None

    def fault(self, error: BaseException) -> str | None:
        """An operation needs all its tensors to have one dtype."""
        line = (str(error).splitlines() or [""])[0]
        if isinstance(error, RuntimeError) and any(words in line for words in OF_TYPES):
            return f"an operation of the model does not take weights in bf16: {line}"
        return None

    def by_hand(self, level: str) -> ByHand | None:
        """Convert the model. ``bf16_master`` takes more than a few lines."""
        if level == "bf16_master":
            return None
        return ByHand(
            setting="convert the model by model.to(torch.bfloat16), which rounds to nearest where"
            " autofit rounds stochastically, and call it inside torch.autocast",
            part=ScriptPart.MODEL,
            prepare="model.to(torch.bfloat16)  # rounded to nearest: autofit rounds stochastically",
            around="torch.autocast(x.device.type, dtype=torch.bfloat16)",
        )

    def on_process(self, level: str, process: ProcessHandle) -> Undo | None:
        """Split weights during the model's creation if they would fill the device."""
        from autofit.strategies.weights.while_made import SplitWhileMade

        if process.levels[SHARDING] != AS_IS:
            return None
        return SplitWhileMade(process).attach()

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Convert the parameters, and run each forward under autocast."""
        from autofit.strategies.weights import bf16, split_float32

        if level == "bf16":
            return bf16.convert(root)
        if root.levels[SHARDING] != AS_IS:
            import torch

            return root.around_forward(lambda forward: autocast(forward, torch.bfloat16))
        split_float32.split(root)
        return None

    def on_optimizer(self, level: str, handle: OptimizerHandle) -> Undo | None:
        """Run each step in float32."""
        from autofit.strategies.weights import bf16, split_float32

        return split_float32.join(handle) if level == "bf16_master" else bf16.around(handle)
