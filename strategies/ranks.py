"""Runs a single-process script as several processes, one a GPU, as the same training."""

from __future__ import annotations

from collections.abc import Mapping

from autofit.exceptions import UsageError
from autofit.facts import Facts, Hardware
from autofit.strategies.base import AS_IS, Fidelity, Level, Memory, Number, Root, Strategy, Undo

FEWEST = 2


class Ranks(Strategy):
    """The script runs as several copies of itself, the *ranks*, and each has a GPU of its own.

    Every integer from 2 on is a level: the number of ranks. Rank 0's batch is divided among the
    ranks in each call of the model. The outputs are joined, and the gradients are summed. Each rank
    then takes the same step with the gradients of the whole batch. Only rank 0 prints and leaves
    files. A later strategy may shard what each rank holds; here each holds the whole model.
    """

    name = "ranks"
    summary = "the batch is divided among copies of the script, each on a GPU of its own"
    source = "https://arxiv.org/abs/2006.15704"
    lowers = frozenset({Memory.ACTIVATIONS})
    number = Number.RANKS
    levels = (
        Level(name=AS_IS, summary="one process, as the script is started"),
        Level(
            name="2",
            summary="two ranks, each with half of the batch",
            slowdown=0.6,
            keeps=0.5,
            undo=False,
        ),
    )

    def numbered(self, name: str) -> Level:
        """Return the level of a number of ranks; raise ``UsageError`` if it is below two."""
        count = int(name)
        if count < FEWEST:
            raise UsageError(f"{self.name} {name}: give {FEWEST} ranks at least")
        summary = f"{count} ranks, each with 1/{count} of the batch"
        part = 1 / count
        return Level(name=name, summary=summary, slowdown=0.2 + part, keeps=part, undo=False)

    def offered(self, hardware: Hardware, facts: Facts) -> tuple[str, ...]:
        """Return one rank for each device, but no more than the batch has samples."""
        most = min([hardware.devices, *(root.batch for root in facts.roots if root.batch)])
        return (str(most),) if most >= FEWEST else ()

    def fidelity(self, level: str, facts: Facts | None = None) -> Fidelity:
        """Exact. If the model has dropout, random draws differ."""
        drops = facts is not None and any(root.dropout for root in facts.roots)
        return Fidelity.REDRAW if drops else Fidelity.EXACT

    def describe(self, level: str) -> str:
        """Return ``"2 ranks"``."""
        return f"{level} ranks"

    def unavailable(self, level: str, hardware: Hardware) -> str | None:
        """Each rank needs a device of its own."""
        if hardware.devices < count(level):
            return f"{level} ranks need as many devices; one training may use {hardware.devices}"
        return None

    def inapplicable(self, level: str, facts: Facts) -> str | None:
        """The script must run as one process, and its calls must be divisible."""
        if facts.world_size > 1:
            return "the script sets up torch.distributed itself"
        if facts.called and all(root.batch is None for root in facts.roots):
            return "no tensor argument of the model has a dimension that looks like a batch"
        if facts.called and all((root.batch or 1) < count(level) for root in facts.roots):
            return f"the model's batch has fewer than {level} samples"
        if any(root.batch_norm and root.compiled for root in facts.roots):
            return "the script compiles a model with BatchNorm, whose statistics all ranks share"
        return None

    def clashes(self, level: str, levels: Mapping[str, str]) -> str | None:
        """Parameters that step inside backward would step before the gradients are summed."""
        if levels.get("gradient_release", AS_IS) != AS_IS:
            return "parameters would step before the gradients of all ranks are summed"
        return None

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Divide the root's calls among the ranks, which the launch has started."""
        return root.share(count(level))


def count(level: str) -> int:
    """Return the number of processes that a level needs."""
    return 1 if level == AS_IS else int(level)
