"""Other implementations of the script's optimizer, or another algorithm in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

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
from autofit.strategies.support.optimizers import ADAM, EIGHT_BIT, FOREACH, FUSED

OTHERS = ("lion", "sgd", "adafactor")
"""Levels that train by another algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation(Level):
    """Another implementation of an optimizer, or another algorithm."""

    change: str
    """The function that changes the optimizer, within this package: ``"fused.fuse"``. It is called
    with the handle and the level."""
    has: str
    """What the optimizer's class must have."""
    classes: Sequence[str]
    """The classes that have it."""
    said: str
    """Its name in the text of a plan."""
    package: str | None = None
    """The package that it needs."""
    quantizes: bool = False
    """Whether the state of large tensors has fewer bits, but not that of small ones."""
    hand: ByHand | None = None


def _made_with(name: str, code: str) -> ByHand:
    """Return an argument with which the optimizer is made, by hand."""
    setting = f"make the optimizer with {name}={code}"
    return ByHand(setting=setting, part=ScriptPart.OPTIMIZER, optimizer={name: code})


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
    levels = (
        Level(name=AS_IS, summary="the script's own implementation"),
        Implementation(
            name="fused",
            summary="one kernel for all parameters (Adam, AdamW, SGD, Adagrad)",
            change="fused.fuse",
            has="fused implementation",
            classes=FUSED,
            said="fused optimizer",
            ordered=True,  # it needs less memory than as_is, and is not slower
            hand=_made_with("fused", "True"),
            slowdown=0.97,
            replaces_as_is=True,
            settings={"trainer": Setting(fields={"optim": "adamw_torch_fused"})},
        ),
        Implementation(
            name="single",
            summary="one parameter after the other, not all at once: no workspace as large as they",
            change="fused.one_at_a_time",
            has="implementation that takes all parameters at once",
            classes=FOREACH,
            said="one-at-a-time optimizer",
            hand=_made_with("foreach", "False"),
            slowdown=1.03,
            keeps=0.6,
            lowers=frozenset({Memory.WORKSPACE}),
            refines=True,
        ),
        Implementation(
            name="eight_bit",
            summary="Adam's, AdamW's and Lion's state in 8 bits, by bitsandbytes",
            change="eight_bit.to_eight_bit",
            has="8-bit implementation",
            classes=EIGHT_BIT,
            said="8-bit optimizer",
            ordered=True,
            package="bitsandbytes",
            quantizes=True,
            hand=ByHand(
                setting="make the optimizer by bitsandbytes.optim.AdamW8bit (or Adam8bit,"
                " Lion8bit), with the weights of embeddings set to 32 bits by"
                " bitsandbytes.optim.GlobalOptimManager",
                part=ScriptPart.OPTIMIZER,
            ),
            fidelity=Fidelity.ROUNDING,
            slowdown=1.05,
            keeps=0.27,
            settings={"trainer": Setting(fields={"optim": "adamw_bnb_8bit"})},
        ),
        Implementation(
            name="lion",
            summary="Lion in place of Adam, at a tenth of its rate: one moment",
            change="recipes.replace",
            has="rates that are known to suit another algorithm",
            classes=ADAM,
            said="Lion for Adam",
            fidelity=Fidelity.RECIPE,
            slowdown=1.04,
            keeps=0.5,
            undo=False,
            refines=True,
        ),
        Implementation(
            name="sgd",
            summary="SGD with momentum in place of Adam, each tensor's step as long as Adam's",
            change="recipes.replace",
            has="rates that are known to suit another algorithm",
            classes=ADAM,
            said="SGD for Adam",
            fidelity=Fidelity.RECIPE,
            slowdown=1.35,
            keeps=0.5,
            undo=False,
            refines=True,
        ),
        Implementation(
            name="adafactor",
            summary="Adafactor in place of Adam, at its rates: squares by row and column",
            change="recipes.replace",
            has="rates that are known to suit another algorithm",
            classes=ADAM,
            said="Adafactor for Adam",
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
        return 2 * share if halved and self._made(level).quantizes else share

    def describe(self, level: str) -> str:
        """Return ``"fused optimizer"``, ``"8-bit optimizer"``, ``"Lion for Adam"``."""
        return self._made(level).said

    def fidelity(self, level: str, facts: Facts | None = None) -> Fidelity:
        """Fused kernels round less often if the weights are in half precision."""
        fused = level == "fused" and facts is not None and _half(facts)
        return Fidelity.ROUNDING if fused else self.level(level).fidelity

    def unavailable(self, level: str, hardware: Hardware) -> str | None:
        """8-bit state needs bitsandbytes."""
        package = self._made(level).package
        if package is not None and find_spec(package) is None:
            return f"{package} is not installed: pip install {package}"
        return None

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """The optimizer's class must have such an implementation. The process checks the rest."""
        made = self._made(level)
        others = [name for name in facts.optimizers if name not in made.classes]
        if others:
            return f"{others[0]} has no {made.has}; {', '.join(made.classes)} have"
        if made.quantizes and any(root.dtype == "float64" for root in facts.roots):
            return "the model's weights are float64"
        fusable = facts.optimizers and all(name in FUSED for name in facts.optimizers)
        if level == "single" and fusable and not _half(facts):
            return "its fused kernels need as little memory and are faster"
        return None

    def by_hand(self, level: str) -> ByHand | None:
        """Return the optimizer's arguments, or its class. Others take more than a few lines."""
        return self._made(level).hand

    def setting(self, level: str, form: str, training: Training) -> Setting | None:
        """A Trainer has such settings for AdamW only."""
        if set(training.facts.optimizers) != {"AdamW"}:
            return None
        return super().setting(level, form, training)

    def replay(self, level: str, step: Replay) -> None:
        """Step parameter by parameter. Small tensors keep their state in 32 bits."""
        if level in OTHERS:
            return
        if self._made(level).quantizes:
            whole = (step.lives.kind == Memory.OPTIMIZER_STATE) & ~step.lives.quantized
            step.lives = step.lives.where(whole, size=step.plain.size)
        step.step_by_parameter()

    def on_optimizer(self, level: str, handle: OptimizerHandle) -> Undo | None:
        """Replace the step. Raises ``Refused`` if the optimizer does not support the level."""
        module, function = self._made(level).change.split(".")
        change = getattr(import_module(f"{__name__}.{module}"), function)
        undo: Undo | None = change(handle, level)
        return undo

    def _made(self, level: str) -> Implementation:
        found = self.level(level)
        assert isinstance(found, Implementation), "as_is changes nothing"
        return found


def _half(facts: Facts) -> bool:
    """Return whether a root's weights are in half precision."""
    return any("16" in root.dtype for root in facts.roots)
