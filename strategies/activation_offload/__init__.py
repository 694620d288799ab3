"""Activation offloading: host memory stores the tensors that forward saves for backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autofit.exceptions import Refused
from autofit.facts import Hardware
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

SMALL = 1 << 20
"""Smaller tensors, in bytes, stay on the device: starting the copy would take longer than it."""
WINDOW = 4
"""Tensors that stay on the device while they are copied to the host."""
SHARES = {"half": 0.5, "all": 1.0}
"""Level to the share of the bytes that leave the device."""


class ActivationOffload(Strategy):
    """Tensors that autograd saves move to pinned host memory and return ahead of backward.

    The copies run on a stream of their own, beside the computation (Rhu et al., 2016). Weights,
    buffers and the batch stay on the device. So do small tensors, and tensors for which the
    host has no room. Together with checkpointing only the inputs of the blocks are moved.
    """

    name = "activation_offload"
    summary = "keeps activations in host memory between forward and backward"
    source = "https://arxiv.org/abs/1602.08124"
    lowers = frozenset({Memory.ACTIVATIONS})
    replays = True
    levels = (
        Level(name=AS_IS, summary="as the script has it"),
        Level(
            name="half",
            summary="half of the bytes, every other tensor",
            slowdown=2.8,
            keeps=0.6,
            refines=True,
        ),
        Level(
            name="all",
            summary="all but small tensors and the last ones before backward",
            slowdown=5.5,
            keeps=0.2,
            refines=True,
        ),
    )

    def describe(self, level: str) -> str:
        """Return ``"activation offload"``, or ``"activation offload half"``."""
        return "activation offload" if level == "all" else f"activation offload {level}"

    def unavailable(self, level: str, hardware: Hardware) -> str | None:
        """A CPU computes in host memory."""
        return "the training runs on the CPU, in host memory already" if hardware.on_host else None

    def fault(self, error: BaseException) -> str | None:
        """torch does not allow saved-tensor hooks everywhere."""
        if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
            return "the model is differentiated where torch allows no hooks on saved tensors"
        return None

    def by_hand(self, level: str) -> ByHand | None:
        """Use torch's own context. It waits for each copy, and copies weights, too."""
        if level != "all":
            return None
        around = "torch.autograd.graph.save_on_cpu(pin_memory=True)"
        setting = f"call the model inside {around}"
        return ByHand(setting=setting, part=ScriptPart.STEP, around=around)

    def replay(self, level: str, step: Replay) -> Callable[[], None]:
        """Move large activations to host memory between their uses in forward and backward."""

        def move() -> None:
            import numpy as np

            lives = step.lives
            large = lives.moving & (lives.size >= SMALL) & (lives.wanted < lives.end + 1)
            large &= (lives.start < step.backward) & (lives.wanted > step.backward)
            order = np.argsort(np.where(large, lives.start, np.inf), kind="stable")
            moved = order[: max(0, int(large.sum()) - WINDOW)]
            mask = np.zeros(len(lives.size), dtype=bool)
            mask[moved[: round(len(moved) * SHARES[level])]] = True
            back = lives.only(mask)
            back = replace(back, start=np.minimum(back.wanted, back.end))
            step.lives = lives.where(mask, end=np.minimum(lives.used, lives.end)).also(back)

        return move

    def on_root(self, level: str, root: Root) -> Undo | None:
        """Put the hooks around each forward."""
        from autofit.strategies.activation_offload import saved_tensors

        offload = saved_tensors.Offload(root.module, SHARES[level])
        if not offload.host_budget.known:
            raise Refused("the free memory of the host is unknown")
        take_back = root.around_forward(offload.around)

        def undo() -> None:
            take_back()
            offload.release()

        return undo
