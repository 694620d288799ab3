"""The optimizer's step inside backward: no gradient waits for the others."""

from __future__ import annotations

from collections.abc import Mapping

from autofit.facts import Facts, Hardware
from autofit.strategies.base import AS_IS, Level, Memory, OptimizerHandle, Replay, Strategy, Undo
from autofit.strategies.support.optimizers import PER_PARAMETER

HOSTED = "hosted"


class GradientRelease(Strategy):
    """Each parameter is updated as soon as its gradient is complete, and the gradient is freed.

    The script's own optimizer computes the update, with the settings that its groups have
    during backward. Its later ``step`` updates the remaining parameters. If the batch is split,
    a gradient is complete with the last chunk. Until then it is kept on the device, or in host
    memory (``hosted``).
    """

    name = "gradient_release"
    summary = "the optimizer steps inside backward, each gradient is freed at once"
    source = "https://arxiv.org/abs/2306.09782"
    lowers = frozenset({Memory.GRADIENTS})
    replays = True
    levels = (
        Level(name=AS_IS, summary="gradients wait for the optimizer's step"),
        Level(
            name="released",
            summary="each parameter steps when its gradient is complete",
            slowdown=1.03,
            keeps=0.1,
            refines=True,
        ),
        Level(
            name=HOSTED,
            summary="the same; gradients of a part of the batch wait in host memory",
            slowdown=1.1,
            keeps=0.08,
            refines=True,
        ),
    )

    def keeps(self, level: str, kind: Memory, levels: Mapping[str, str]) -> float:
        """If the batch is split, ``released`` keeps gradients on the device to the last chunk."""
        split = levels.get("micro_batch", AS_IS) != AS_IS
        return 1.0 if split and level == "released" else super().keeps(level, kind, levels)

    def describe(self, level: str) -> str:
        """Return ``"gradients released"`` or ``"gradients hosted"``."""
        return f"gradients {level}"

    def unavailable(self, level: str, hardware: Hardware) -> str | None:
        """On the CPU gradients are in host memory already."""
        if level == HOSTED and hardware.on_host:
            return "gradients are in host memory already"
        return None

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """The script must run one backward pass a step, for one model and one optimizer.

        It must not read or scale the gradients before the step.
        """
        others = [name for name in facts.optimizers if name not in PER_PARAMETER]
        reasons = {
            "the script accumulates gradients over several calls": facts.calls_per_step > 1,
            "the script trains several models": len(facts.roots) > 1,
            "the script has several optimizers": len(facts.optimizers) > 1,
            "the script scales its loss, and unscales all gradients before a step": facts.scaler,
            "the script clips or reads the gradients before its step": facts.gradients_read,
            "a gradient that the script has set to zero counts as one": facts.gradients_zeroed,
            "the script calls torch.autograd.grad on the model's parameters": facts.autograd_grad,
            "gradients are averaged over ranks after backward has made them": facts.world_size > 1,
            f"{', '.join(others)} may update parameters together": bool(others),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def clashes(self, level: str, levels: Mapping[str, str]) -> str | None:
        """Loss scaling reads all gradients before a step.

        ``hosted`` has no effect on a batch in one piece.
        """
        if levels["precision"] == "fp16":
            return "gradient_release: under fp16 a step with an overflow is skipped as a whole"
        if level == HOSTED and levels["micro_batch"] == AS_IS:
            return "gradient_release: without a split batch, no gradients wait"
        return None

    def fault(self, error: BaseException) -> str | None:
        """Backward needed a weight that had already been updated."""
        if "modified by an inplace operation" in str(error):
            return "a weight is needed in backward after its gradient is complete"
        return None

    def replay(self, level: str, step: Replay) -> None:
        """Free each gradient after the step of its parameter, within backward."""
        import numpy as np

        lives = step.lives
        end = np.minimum(lives.end, lives.start + 2)
        step.lives = lives.where(lives.kind == Memory.GRADIENTS, end=end)
        step.step_by_parameter()

    def on_optimizer(self, level: str, handle: OptimizerHandle) -> Undo | None:
        """Step inside backward. Raises ``Refused`` if that would change the training."""
        from autofit.strategies.gradient_release.steps import release

        return release(handle, hosted=level == HOSTED)
