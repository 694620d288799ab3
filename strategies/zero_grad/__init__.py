"""Frees gradients that the script sets to zero in place."""

from __future__ import annotations

from collections.abc import Mapping

from autofit.facts import Facts
from autofit.strategies.base import (
    AS_IS,
    ByHand,
    Level,
    Memory,
    Replay,
    Root,
    ScriptPart,
    Strategy,
    Undo,
)


class ZeroGrad(Strategy):
    """``zero_grad(set_to_none=False)`` frees the gradients, as torch's default does.

    Zeros would be held through the next forward, when activations are largest. A parameter
    without a gradient gets its zeros back before its optimizer steps. So momentum and weight
    decay continue as in the script.
    """

    name = "zero_grad"
    summary = "gradients are dropped, not set to zero, where the script asks for zeros"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html"
    lowers = frozenset({Memory.GRADIENTS})
    replays = True
    levels = (
        Level(name=AS_IS, summary="as the script has it"),
        Level(
            name="set_to_none",
            summary="no gradients during forward",
            slowdown=0.95,
            keeps=0.5,
            refines=True,
        ),
    )

    def keeps(self, level: str, kind: Memory, levels: Mapping[str, str]) -> float:
        """When the optimizer steps all gradients are there; the room is gained during forward."""
        return 1.0

    def describe(self, level: str) -> str:
        """Return ``"gradients dropped"``."""
        return "gradients dropped"

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """The script must set gradients to zero in place."""
        if facts.gradients_zeroed or not facts.optimizers:
            return None
        return "the script does not set gradients to zero: it frees them already"

    def clashes(self, level: str, levels: Mapping[str, str]) -> str | None:
        """``gradient_release`` frees the gradients before."""
        if levels.get("gradient_release", AS_IS) != AS_IS:
            return "gradient_release frees the gradients in backward already"
        return None

    def by_hand(self, level: str) -> ByHand:
        """Leave out the argument."""
        setting = "call optimizer.zero_grad() without set_to_none=False"
        calls = {"zero_grad": {"set_to_none": "True"}}
        return ByHand(setting=setting, part=ScriptPart.STEP, calls=calls)

    def replay(self, level: str, step: Replay) -> None:
        """Let gradients that last from step to step begin where backward makes them."""
        import numpy as np

        lives = step.lives
        lasting = (lives.kind == Memory.GRADIENTS) & (lives.start == 0)
        step.lives = lives.where(lasting, start=np.minimum(lives.wanted, lives.end))

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Patch ``zero_grad`` for the whole process."""
        from autofit.strategies.zero_grad.gradients import Dropped

        return root.outliving(Dropped().attach(root))
