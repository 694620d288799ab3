"""The loss scale with which an eager call computes float16 gradients.

An eager call differentiates its chunks before the script multiplies the loss by its scale. In fp32
and bf16 the gradients can be multiplied afterwards. In fp16, gradients without the scale underflow
(Micikevicius et al., 2018), and with too large a scale they overflow. So the call uses the scale of
the previous calls, once two of them agreed. If another scale comes in, the gradients are dropped
and the chunks run again: the step costs a recomputation, and its gradients have its own scale.
"""

from __future__ import annotations

import torch

from autofit.worker.harness.torch_state.graph import nodes
from autofit.worker.harness.torch_state.rng import Ambient


class LossScale:
    """The factor by which the script multiplies one root's loss before backward."""

    def __init__(self) -> None:
        self.factor: torch.Tensor | None = None
        """The last factor."""
        self.settled = False
        """The last two factors were the same."""
        self._half: dict[Ambient, bool] = {}

    def note(self, factor: torch.Tensor) -> None:
        """Record ``factor``; synchronizes with the device."""
        self.settled = equal_factors(self.factor, factor)
        self.factor = factor.detach().clone()

    def matters(self, ambient: Ambient) -> bool | None:
        """Return whether gradients flow in float16 under ``ambient``; ``None`` before ``learn``."""
        return True if ambient.half else self._half.get(ambient)

    def learn(self, ambient: Ambient, loss: torch.Tensor) -> bool:
        """Search the graph of a loss for float16 gradients; record and return the answer.

        The script may enter autocast inside the model, or have float16 weights.
        """
        self._half[ambient] = _flows_in_half(loss)
        return self._half[ambient]


def equal_factors(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Return whether two factors are equal; NaN equals nothing."""
    return equal_kind(one, other) and one is not None and torch.equal(one, other)


def equal_kind(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Return whether two factors have one data type and device."""
    return one is not None and (one.dtype, one.device) == (other.dtype, other.device)


def _flows_in_half(loss: torch.Tensor) -> bool:
    return any(
        each.dtype is torch.float16 for node in nodes([loss]) for each in node._input_metadata
    )
