"""Keeps the optimizer state in host memory, and steps it on the device in pieces."""

from __future__ import annotations

from collections.abc import Mapping

from autofit.facts import Facts, Hardware
from autofit.strategies.base import AS_IS, Level, Memory, OptimizerHandle, Replay, Strategy, Undo
from autofit.strategies.support.optimizers import ELEMENTWISE

BESIDE = (AS_IS, "fused", "single")
"""Levels of ``optimizer`` that use the script's own state."""


class OptimizerOffload(Strategy):
    """The optimizer state lies in pinned host memory; a step streams it through the device.

    The script's own optimizer computes the step on the device, piece by piece. Two streams
    alternate, so one piece is copied down while the next one is copied up. Under
    ``gradient_release`` this happens during backward. ZeRO-Offload (Ren et al., 2021) steps on
    the CPU instead; over today's buses moving the state takes less time.
    """

    name = "optimizer_offload"
    summary = "the optimizer's state waits in host memory"
    source = "https://arxiv.org/abs/2101.06840"
    lowers = frozenset({Memory.OPTIMIZER_STATE})
    replays = True
    levels = (
        Level(name=AS_IS, summary="state lies on the device"),
        Level(
            name="streamed",
            summary="state goes up and down, piece by piece, beside the computation",
            slowdown=1.55,
            keeps=0.05,
            refines=True,
        ),
    )

    def describe(self, level: str) -> str:
        """Return ``"optimizer state streamed"``."""
        return f"optimizer state {level}"

    def unavailable(self, level: str, hardware: Hardware) -> str | None:
        """A CPU computes in host memory."""
        return "the training runs on the CPU, in host memory already" if hardware.on_host else None

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """The optimizer must update each element separately."""
        others = [name for name in facts.optimizers if name not in ELEMENTWISE]
        if not others:
            return None
        elementwise = ", ".join(ELEMENTWISE)
        return f"{others[0]} is not known to update each element by itself; {elementwise} do"

    def clashes(self, level: str, levels: Mapping[str, str]) -> str | None:
        """Another algorithm or kernel has another form of state."""
        other = levels["optimizer"]
        if other not in BESIDE:
            return f"optimizer_offload: the state of optimizer {other} has a format of its own"
        return None

    def replay(self, level: str, step: Replay) -> None:
        """Step piece by piece."""
        step.step_by_parameter()

    def on_optimizer(self, level: str, handle: OptimizerHandle) -> Undo | None:
        """Keep the state off the device. Raises ``Refused`` if it cannot be split into pieces."""
        from autofit.strategies.optimizer_offload.host_steps import offload

        return offload(handle)
