"""The factor that the gradients of an eager call are made with, where they flow in float16.

An eager call differentiates its chunks before the script says what its loss is multiplied by. In
fp32 and bf16 that can be made up for afterwards; in fp16 gradients that were not scaled up have
vanished by then (Micikevicius et al., 2018), and scaled up too far they have overflowed. So the
factor of the calls before is used, once two of them agreed, and where another one comes in the
gradients are thrown away and the chunks run again: a step whose scale has changed costs a
recomputation, and its gradients are those of its own scale.
"""

from __future__ import annotations

import torch

from autofit.worker.harness.torch_state.rng import Ambient


class LossScale:
    """What the script multiplies one root's loss by before its backward."""

    def __init__(self) -> None:
        self.factor: torch.Tensor | None = None
        """The last that came in."""
        self.settled = False
        """It was the same twice in succession."""
        self._half: dict[Ambient, bool] = {}

    def note(self, factor: torch.Tensor) -> None:
        """Remember ``factor``; waits for the device."""
        self.settled = alike(self.factor, factor)
        self.factor = factor.detach().clone()

    def matters(self, ambient: Ambient) -> bool | None:
        """Return whether gradients flow in float16 in such calls; ``None`` before ``learn``."""
        return True if ambient.half else self._half.get(ambient)

    def learn(self, ambient: Ambient, loss: torch.Tensor) -> bool:
        """Look through the graph of such a call's loss; return whether they do.

        The script may enter autocast inside the model, or have float16 weights.
        """
        self._half[ambient] = _flows_in_half(loss)
        return self._half[ambient]


def alike(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Return whether two factors are the same; not-a-number never is."""
    if one is None or (one.dtype, one.device) != (other.dtype, other.device):
        return False
    return torch.equal(one, other)


def _flows_in_half(loss: torch.Tensor) -> bool:
    seen = set()
    ahead = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(each.dtype is torch.float16 for each in node._input_metadata):
            return True
        ahead += [following for following, _ in node.next_functions]
    return False
