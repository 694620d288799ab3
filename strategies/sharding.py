"""Shards over the ranks what each of them would otherwise hold as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autofit.facts import Facts, Hardware
from autofit.strategies.base import (
    AS_IS,
    Level,
    Memory,
    OptimizerHandle,
    ProcessHandle,
    Root,
    Shards,
    Strategy,
    Undo,
)
from autofit.strategies.support.optimizers import ELEMENTWISE, PER_PARAMETER

NOT_BESIDE_WEIGHTS = ("activation_offload", "loss", "micro_batch", "memory_format", "compile")
"""Strategies that read weights outside their block, or run it another number of times."""
BESIDE = (AS_IS, "fused", "single")
"""Levels of ``optimizer`` that use the script's own state."""
HALF = ("weights", "bf16_master")
"""The weights are gathered in bfloat16; the optimizer steps float32 shards."""
NOT_BESIDE = ("adapters", "weights", "optimizer_offload", "gradient_release")
"""Strategies that keep weights or state in a form of their own."""


class Sharding(Strategy):
    """Each rank keeps a part of what all ranks would hold alike.

    Under ``zero1`` each parameter has a rank that keeps its optimizer state and steps it. The
    others then receive its new values. Under the other levels each rank keeps a part of every
    parameter, of its gradient and of its state (FSDP2). A repeated block is gathered for its
    forward and backward. The script sees whole values on all ranks, as in one process: in
    ``state_dict``, in ``optimizer.state`` and in whatever it computes from parameters.

    ``full_offload`` keeps the parts in host memory, and the optimizer steps them there. It needs
    no other rank: a single process then holds one or two blocks at a time on its device.
    """

    name = "sharding"
    summary = "each of the ranks keeps a part of weights, gradients or optimizer state"
    source = "https://arxiv.org/abs/1910.02054"
    lowers = frozenset({Memory.OPTIMIZER_STATE, Memory.WEIGHTS, Memory.GRADIENTS})
    levels = (
        Level(name=AS_IS, summary="each rank holds all of it"),
        Level(
            name="zero1",
            summary="each rank keeps the optimizer state of its share of the parameters",
            slowdown=1.05,
            keeps=0.5,
            lowers=frozenset({Memory.OPTIMIZER_STATE}),
            undo=False,
            shards=Shards(weights=False),
        ),
        Level(
            name="zero2",
            summary="as full, but weights stay gathered from their forward to their backward",
            slowdown=1.08,
            keeps=0.5,
            lowers=frozenset({Memory.OPTIMIZER_STATE, Memory.GRADIENTS}),
            undo=False,
            shards=Shards(gathers_twice=False),
        ),
        Level(
            name="full",
            summary="each rank keeps a part of weights, gradients and optimizer state (FSDP2)",
            slowdown=1.1,
            keeps=0.55,
            made=0.0,
            undo=False,
            shards=Shards(),
        ),
        Level(
            name="hybrid",
            summary="as full within each half of the ranks, which hold the same",
            slowdown=1.1,
            keeps=0.55,
            made=0.0,
            undo=False,
            alone=True,
            shards=Shards(groups=2),
        ),
        Level(
            name="full_offload",
            summary="as full, but the parts are in host memory, where the optimizer steps them",
            slowdown=2.5,
            keeps=0.15,
            made=0.0,
            undo=False,
            alone=True,
            shards=Shards(on_host=True),
        ),
    )

    def offered(self, hardware: Hardware, facts: Facts) -> tuple[str, ...]:
        """Return the levels that the devices make possible.

        ``full_offload`` is slower than the other levels that lower the same, so no search tries it.
        """
        if hardware.devices == 1:
            return ()
        left_out = {"full_offload"}
        if hardware.devices == 2 or hardware.devices % 2:
            left_out.add("hybrid")
        return tuple(name for name in super().offered(hardware, facts) if name not in left_out)

    def keeps(self, level: str, kind: Memory, levels: Mapping[str, str]) -> float:
        """Return the share of one rank; that of two if the number is not known."""
        ranks = levels.get("ranks", AS_IS)
        shards = self.level(level).shards
        own = kind in self.lowered(level)
        if shards is None or shards.on_host or ranks == AS_IS or not own:
            return super().keeps(level, kind, levels)
        return shards.groups / int(ranks)

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """Each parameter must step by itself."""
        weights = self._of_weights(level)
        known = ELEMENTWISE if weights else PER_PARAMETER
        others = [name for name in facts.optimizers if name not in known]
        if others:
            return f"{others[0]} may update parameters together"
        if weights is None:
            return None
        if any(root.compiled for root in facts.roots):
            return "the script compiles the model, and the weights are gathered block by block"
        if facts.autograd_grad:
            return "the script calls torch.autograd.grad on the model's parameters"
        return None

    def clashes(self, level: str, levels: Mapping[str, str]) -> str | None:
        """There must be ranks, and the state must have the form that the script gives it."""
        shards = self._of_weights(level)
        if levels["ranks"] == AS_IS and not (shards and shards.on_host):
            return "sharding needs several ranks"
        groups = shards.groups if shards else 1
        if groups > 1 and (int(levels["ranks"]) % groups or int(levels["ranks"]) == groups):
            return f"sharding {level} needs an even number of ranks, at least four"
        for name in NOT_BESIDE:
            gathered_in_half = shards and (name, levels[name]) == HALF
            if levels[name] != AS_IS and not gathered_in_half:
                return f"sharding: it cannot divide the weights or the state that {name} keeps"
        for name in NOT_BESIDE_WEIGHTS if shards else ():
            alone = name == "micro_batch" and levels["ranks"] == AS_IS
            if levels[name] != AS_IS and not alone:
                return f"sharding: each block must run once with its weights; {name} changes that"
        if shards and levels["precision"] == "fp16":
            return "sharding cannot be combined with fp16, whose loss scaling needs whole gradients"
        if levels["optimizer"] not in BESIDE:
            return f"sharding: it cannot divide the state of optimizer {levels['optimizer']}"
        return None

    def on_process(self, level: str, process: ProcessHandle) -> Undo | None:
        """Let the script create a model that is too large for one device."""
        shards = self._of_weights(level)
        return process.page_weights() if shards and shards.gathers_twice else None

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Shard the weights, if the level does. Raises ``Refused`` if other ranks are missing."""
        if (shards := self._of_weights(level)) is None:
            return None
        return root.shard_weights(replace(shards, half=HALF in root.levels.items()))

    def on_optimizer(self, level: str, handle: OptimizerHandle) -> Undo | None:
        """Let each rank step its share. Raises ``Refused`` if other ranks are missing."""
        return handle.shard_state(self._of_weights(level))

    def _of_weights(self, level: str) -> Shards | None:
        """Return how ``level`` shards the weights; ``None`` if it does not."""
        shards = self.level(level).shards
        return shards if shards is not None and shards.weights else None
