"""Shards over the ranks what each of them would otherwise hold as a whole."""

from __future__ import annotations

from collections.abc import Mapping

from autofit.facts import Facts
from autofit.strategies.base import AS_IS, Level, Memory, OptimizerHandle, Strategy, Undo
from autofit.strategies.support.optimizer_classes import PER_PARAMETER

BESIDE = (AS_IS, "fused", "single")
"""Levels of ``optimizer`` that use the script's own state."""
NOT_BESIDE = ("adapters", "weights", "optimizer_offload", "gradient_release")
"""Strategies that keep weights or state in a form of their own."""


class Sharding(Strategy):
    """Each rank keeps a part of what all ranks would hold alike.

    Under ``zero1`` each parameter has a rank that keeps its optimizer state and steps it. The
    others then receive its new values. ``state_dict`` and ``optimizer.state`` show the whole state
    on all ranks, as in one process.
    """

    name = "sharding"
    summary = "each of the ranks keeps a part of the optimizer state"
    source = "https://arxiv.org/abs/1910.02054"
    lowers = frozenset({Memory.OPTIMIZER_STATE})
    levels = (
        Level(name=AS_IS, summary="each rank holds all of it"),
        Level(
            name="zero1",
            summary="each rank keeps the optimizer state of its share of the parameters",
            slowdown=1.05,
            keeps=0.5,
            undo=False,
        ),
    )

    def keeps(self, level: str, kind: Memory, levels: Mapping[str, str]) -> float:
        """Return the share of one rank; that of two if the number is not known."""
        ranks = levels.get("ranks", AS_IS)
        if ranks == AS_IS or kind not in self.lowered(level):
            return super().keeps(level, kind, levels)
        return 1 / int(ranks)

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """Each parameter must step by itself."""
        others = [name for name in facts.optimizers if name not in PER_PARAMETER]
        if others:
            return f"{others[0]} may update parameters together"
        return None

    def clashes(self, level: str, levels: Mapping[str, str]) -> str | None:
        """There must be ranks, and the state must have the form that the script gives it."""
        if levels["ranks"] == AS_IS:
            return "sharding: one process has nobody to share with: it needs ranks"
        for name in NOT_BESIDE:
            if levels[name] != AS_IS:
                return f"sharding: {name} keeps weights or state in a form of its own"
        if levels["optimizer"] not in BESIDE:
            return f"sharding: the state of optimizer {levels['optimizer']} has a form of its own"
        return None

    def on_optimizer(self, level: str, handle: OptimizerHandle) -> Undo | None:
        """Let each rank step its share. Raises ``Refused`` if the launch has one process."""
        return handle.shard_state()
