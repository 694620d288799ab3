"""What is known of the script's optimizer: what it keeps for a parameter, and in which form."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autofit.strategies.base import Stepper
from autofit.strategies.weights.split_float32 import type_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An optimizer's algorithm, and how it writes the state of a parameter."""

    kernel: str
    """What bitsandbytes calls it."""
    moments: tuple[str, ...]
    """Names of what it keeps, in the parameter's shape; the first has a sign, the second none."""
    dtype: torch.dtype | None = None
    """Of the moments; ``None`` where it is the parameter's."""
    counter: type | None = None
    """Of the number of steps taken: a tensor or an ``int``, or ``None`` where it keeps none."""
    rest: Stepper
    """Takes the step of the parameters that keep the plain state."""

    @property
    def codes(self) -> tuple[str, ...]:
        """Names of the moments' 8-bit codes."""
        return tuple(f"{name}_codes" for name in self.moments)

    @property
    def scales(self) -> tuple[str, ...]:
        """Names of the codes' scales."""
        return tuple(f"{name}_scales" for name in self.moments)

    def of(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the precision of a parameter's moments."""
        return self.dtype or type_of(parameter)

    def counted(self, step: int) -> dict[str, torch.Tensor | int]:
        """Return the number of steps taken as the plain state has it."""
        if self.counter is None:
            return {}
        return {"step": step if self.counter is int else torch.tensor(float(step))}
