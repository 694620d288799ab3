"""Other implementations of the script's optimizer, or another algorithm in its place."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import ClassVar

from autofit.facts import Facts, Hardware
from autofit.strategies.base import (
    AS_IS,
    ByHand,
    Fidelity,
    Level,
    Memory,
    OptimizerHandle,
    Replay,
    ScriptPart,
    Setting,
    Strategy,
    Training,
    Undo,
)
from autofit.strategies.support.optimizer_classes import ADAM, EIGHT_BIT, FOREACH, FUSED

OTHERS = ("lion", "sgd", "adafactor")
"""Levels that train by another algorithm."""

HAVE = {
    "fused": ("fused implementation", FUSED),
    "single": ("implementation that takes all parameters at once", FOREACH),
    "eight_bit": ("8-bit implementation", EIGHT_BIT),
    **dict.fromkeys(OTHERS, ("rates that are known to suit another algorithm", ADAM)),
}
"""What each level needs of an optimizer's class, and the classes that have it."""


class Optimizer(Strategy):
    """Another implementation behind the script's own optimizer object, or another algorithm.

    Parameter groups, schedules, clipping and closures of the script keep working. Checkpoints
    are the same as without the level, in both directions. Only another algorithm, which is a
    recipe, saves its own state. 8-bit state is quantised in blocks (Dettmers et al., 2022).
    Small tensors and embeddings keep 32 bits, as bitsandbytes advises.
    """

    name = "optimizer"
    summary = "the script's own optimizer, in a faster implementation or with smaller state"
    source = "https://arxiv.org/abs/2110.02861"
    lowers = frozenset({Memory.OPTIMIZER_STATE, Memory.WORKSPACE})
    replays = True
    ordered = ("fused", "eight_bit")  # fused needs less memory than as_is, and is not slower
    removed: ClassVar[Mapping[str, str]] = {"paged": "fused", "paged_eight_bit": "eight_bit"}
    levels = (
        Level(name=AS_IS, summary="the script's own implementation"),
        Level(
            name="fused",
            summary="one kernel for all parameters (Adam, AdamW, SGD, Adagrad)",
            slowdown=0.97,
            replaces_as_is=True,
            settings={"trainer": Setting(fields={"optim": "adamw_torch_fused"})},
        ),
        Level(
            name="single",
            summary="one parameter after the other, not all at once: no workspace as large as they",
            slowdown=1.03,
            keeps=0.6,
            lowers=frozenset({Memory.WORKSPACE}),
            refines=True,
        ),
        Level(
            name="eight_bit",
            summary="Adam's, AdamW's and Lion's state in 8 bits, by bitsandbytes",
            fidelity=Fidelity.ROUNDING,
            slowdown=1.05,
            keeps=0.27,
            settings={"trainer": Setting(fields={"optim": "adamw_bnb_8bit"})},
        ),
        Level(
            name="lion",
            summary="Lion in place of Adam, at a tenth of its rate: one moment",
            fidelity=Fidelity.RECIPE,
            slowdown=1.04,
            keeps=0.5,
            undo=False,
            refines=True,
        ),
        Level(
            name="sgd",
            summary="SGD with momentum in place of Adam, each tensor's step as long as Adam's",
            fidelity=Fidelity.RECIPE,
            slowdown=1.35,
            keeps=0.5,
            undo=False,
            refines=True,
        ),
        Level(
            name="adafactor",
            summary="Adafactor in place of Adam, at its rates: squares by row and column",
            fidelity=Fidelity.RECIPE,
            slowdown=1.32,
            keeps=0.05,
            undo=False,
            refines=True,
        ),
    )

    def keeps(self, level: str, kind: Memory, levels: Mapping[str, str]) -> float:
        """8-bit state is no smaller if ``weights`` already halves the state."""
        halved = kind is Memory.OPTIMIZER_STATE and levels.get("weights", AS_IS) == "bf16"
        share = super().keeps(level, kind, levels)
        return 2 * share if halved and level == "eight_bit" else share

    def describe(self, level: str) -> str:
        """Return ``"fused optimizer"``, ``"8-bit optimizer"``, ``"Lion for Adam"``."""
        said = {"eight_bit": "8-bit optimizer", "single": "one-at-a-time optimizer"}
        algorithms = {"lion": "Lion", "sgd": "SGD", "adafactor": "Adafactor"}
        other = f"{algorithms[level]} for Adam" if level in OTHERS else f"{level} optimizer"
        return said.get(level, other)

    def fidelity(self, level: str, facts: Facts | None = None) -> Fidelity:
        """Fused kernels round less often if the weights are in half precision."""
        fused = level == "fused" and facts is not None and _half(facts)
        return Fidelity.ROUNDING if fused else self.level(level).fidelity

    def unavailable(self, level: str, hardware: Hardware) -> str | None:
        """8-bit state needs bitsandbytes."""
        if level == "eight_bit" and find_spec("bitsandbytes") is None:
            return "bitsandbytes is not installed: pip install bitsandbytes"
        return None

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """The optimizer's class must have such an implementation. The process checks the rest."""
        what, known = HAVE[level]
        others = [name for name in facts.optimizers if name not in known]
        if others:
            return f"{others[0]} has no {what}; {', '.join(known)} have"
        if level == "eight_bit" and any(root.dtype == "float64" for root in facts.roots):
            return "the model's weights are float64"
        fusable = facts.optimizers and all(name in FUSED for name in facts.optimizers)
        if level == "single" and fusable and not _half(facts):
            return "its fused kernels need as little memory and are faster"
        return None

    def by_hand(self, level: str) -> ByHand | None:
        """Return the optimizer's arguments, or its class. Others take more than a few lines."""
        if level in OTHERS:
            return None
        if level == "eight_bit":
            setting = (
                "make the optimizer by bitsandbytes.optim.AdamW8bit (or Adam8bit, Lion8bit), with"
                " the weights of embeddings set to 32 bits by bitsandbytes.optim.GlobalOptimManager"
            )
            return ByHand(setting=setting, part=ScriptPart.OPTIMIZER)
        name, code = {"fused": ("fused", "True"), "single": ("foreach", "False")}[level]
        setting = f"make the optimizer with {name}={code}"
        return ByHand(setting=setting, part=ScriptPart.OPTIMIZER, optimizer={name: code})

    def setting(self, level: str, form: str, training: Training) -> Setting | None:
        """A Trainer has such settings for AdamW only."""
        if set(training.facts.optimizers) != {"AdamW"}:
            return None
        return super().setting(level, form, training)

    def replay(self, level: str, step: Replay) -> None:
        """Step parameter by parameter. Small tensors keep their state in 32 bits."""
        if level in OTHERS:
            return
        if level == "eight_bit":
            whole = (step.lives.kind == Memory.OPTIMIZER_STATE) & ~step.lives.quantized
            step.lives = step.lives.where(whole, size=step.plain.size)
        step.step_by_parameter()

    def on_optimizer(self, level: str, handle: OptimizerHandle) -> Undo | None:
        """Replace the step. Raises ``Refused`` if the optimizer does not support the level."""
        if level == "fused":
            from autofit.strategies.optimizer.fused import fuse

            return fuse(handle)
        if level == "single":
            from autofit.strategies.optimizer.fused import one_at_a_time

            return one_at_a_time(handle)
        if level in OTHERS:
            from autofit.strategies.optimizer.recipes import replace

            return replace(handle, level)
        from autofit.strategies.optimizer.eight_bit import to_eight_bit

        return to_eight_bit(handle)


def _half(facts: Facts) -> bool:
    """Return whether a root's weights are in half precision."""
    return any("16" in root.dtype for root in facts.roots)
