"""Lower precision in matrix products: TF32, or bf16 and fp16 autocast around the root."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from autofit.facts import Facts, Hardware
from autofit.strategies.base import (
    AS_IS,
    ByHand,
    Fidelity,
    Forward,
    Level,
    Memory,
    Root,
    ScriptPart,
    Setting,
    Strategy,
    Training,
    Undo,
)

if TYPE_CHECKING:
    import torch

SECOND_COPY = (
    "The Trainer keeps a 16-bit copy of all weights until it has the loss,",
    "  so the peak may be higher than the one above.",
)
AMPERE = (8, 0)
"""The first CUDA compute capability with TF32 and bf16 matrix units."""


class Precision(Strategy):
    """Autocast around each forward of the model; floating-point outputs are returned in fp32.

    Weights, gradients and the optimizer stay in fp32 (Micikevicius et al., 2018). A loss
    outside the model sees fp32, as under the mixed precision of ``accelerate``.
    """

    name = "precision"
    summary = "matrix products in lower precision; weights and optimizer stay in fp32"
    source = "https://arxiv.org/abs/1710.03740"
    lowers = frozenset({Memory.ACTIVATIONS})
    replays = True
    redraws = True  # attention with dropout uses other kernels in half precision
    levels = (
        Level(name=AS_IS, summary="the script's own precision"),
        Level(
            name="tf32",
            summary="fp32 matrix products on TF32 tensor cores",
            fidelity=Fidelity.ROUNDING,
            slowdown=0.35,
            settings={"trainer": Setting(fields={"tf32": True})},
        ),
        Level(
            name="bf16",
            summary="bfloat16 autocast",
            fidelity=Fidelity.ROUNDING,
            slowdown=0.2,
            keeps=0.6,
            autocast="bfloat16",
            settings={
                "accelerate": Setting(fields={"mixed_precision": "bf16"}),
                # The section bf16 would convert the weights. Autocast keeps them in float32.
                "deepspeed": Setting(
                    fields={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
                ),
                "lightning": Setting(fields={"precision": '"bf16-mixed"'}),
                "trainer": Setting(fields={"bf16": True}, notes=SECOND_COPY),
            },
        ),
        Level(
            name="fp16",
            summary="float16 autocast with loss scaling inside the root",
            fidelity=Fidelity.ROUNDING,
            slowdown=0.21,
            keeps=0.6,
            autocast="float16",
            settings={
                "accelerate": Setting(
                    fields={"mixed_precision": "fp16"},
                    notes=("Accelerate's own scaler scales the loss, not the model's call.",),
                ),
                "lightning": Setting(
                    fields={"precision": '"16-mixed"'},
                    notes=("Lightning's own scaler scales the loss, not the model's call.",),
                ),
                "trainer": Setting(
                    fields={"fp16": True},
                    notes=(
                        "fp16: Trainer's own scaler scales the loss, not the model's call.",
                        *SECOND_COPY,
                    ),
                ),
            },
        ),
    )

    def describe(self, level: str) -> str:
        """Return the level's name."""
        return level

    def unavailable(self, level: str, hardware: Hardware) -> str | None:
        """TF32 and fp16 need a GPU. TF32 and bf16 need Ampere; fp16 is for older GPUs."""
        if hardware.device != "cuda":
            return None if level == "bf16" else f"{level} needs a CUDA device"
        if level != "fp16" and (hardware.capability or (0, 0)) < AMPERE:
            return f"{level} needs compute capability 8.0, {hardware.name} has less"
        if level == "fp16" and (hardware.capability or (0, 0)) >= AMPERE:
            return "bf16 is as fast here and needs no loss scaling"
        return None

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """A script that chose its precision keeps it."""
        if facts.autocast:
            return "the script runs under autocast already"
        dtypes = {root.dtype for root in facts.roots}
        if dtypes and dtypes != {"float32"}:
            return f"the model's weights are {', '.join(sorted(dtypes))}, not float32"
        if level == "fp16" and facts.scaler:
            return "the script scales its loss already"
        return None

    def by_hand(self, level: str) -> ByHand:
        """Use autocast around the forward, or set TF32 for the process."""
        if level == "tf32":
            lines = (
                'torch.set_float32_matmul_precision("high")',
                "torch.backends.cudnn.allow_tf32 = True",
            )
            setting = f"write {' and '.join(lines)}"
            return ByHand(setting=setting, part=ScriptPart.SCRIPT, prepare="\n".join(lines))
        dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[level]
        around = f"torch.autocast(x.device.type, dtype={dtype})"
        scaled = level == "fp16"
        scaler = ", and scale the loss by torch.amp.GradScaler" if scaled else ""
        setting = f"call the model inside {around}{scaler}"
        return ByHand(setting=setting, part=ScriptPart.STEP, around=around, scaled=scaled)

    def statements(
        self, level: str, model: str, blocks: str | None, training: Training
    ) -> Sequence[str] | None:
        """Put bf16 around the forward alone. The loss stays outside of autocast."""
        if level != "bf16":
            return None
        # Around the loss, autocast would compute cross-entropy in bf16 on a GPU.
        return (
            "import accelerate.utils",
            f"{model}.forward = accelerate.utils.convert_outputs_to_fp32(",
            f'    torch.autocast("{training.device}", dtype=torch.bfloat16)({model}.forward)',
            ")",
        )

    def around_forward(self, level: str, device: str) -> AbstractContextManager[object] | None:
        """Return TF32 for the process, or autocast."""
        import torch

        from autofit.strategies.inspection import tf32

        if level == "tf32":
            return tf32.switched(True)
        return torch.autocast(device, dtype=getattr(torch, str(self.level(level).autocast)))

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Use autocast around each forward. Under fp16 also scale gradients inside the root."""
        if level == "tf32":
            from autofit.strategies.inspection import tf32

            return root.outliving(tf32.switch(True))
        import torch

        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[level]
        undo = root.around_forward(lambda forward: autocast(forward, dtype))
        if level == "bf16":
            return undo
        from autofit.strategies.precision.loss_scaling import scale_inside

        undo_scaling = scale_inside(root)

        def undo_both() -> None:
            undo_scaling()
            undo()

        return undo_both


def autocast(forward: Forward, dtype: torch.dtype) -> Forward:
    """Return ``forward`` under autocast; what it returns is float32."""
    import torch
    from accelerate.utils import convert_to_fp32

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(_device_type(args, kwargs), dtype=dtype):
            output = forward(*args, **kwargs)
        return convert_to_fp32(output)

    return call


def _device_type(args: Any, kwargs: Any) -> str:
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return next((tensor.device.type for tensor in tensors), "cpu")
