"""The form of the state that the script's optimizer keeps for a parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autofit.strategies.base import Stepper
from autofit.strategies.weights.split_float32 import type_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An optimizer's algorithm, and the form of a parameter's state."""

    kernel: str
    """Name of bitsandbytes' kernel."""
    moments: tuple[str, ...]
    """Names of the moments in the parameter's shape. The first is signed, the second is not."""
    dtype: torch.dtype | None = None
    """Data type of the moments; ``None`` for the parameter's."""
    counter: type | None = None
    """Type of the step counter: a tensor or an ``int``; ``None`` without one."""
    rest: Stepper
    """Steps the parameters that keep the plain state."""

    @property
    def codes(self) -> tuple[str, ...]:
        """Names of the moments' 8-bit codes."""
        return tuple(f"{name}_codes" for name in self.moments)

    @property
    def scales(self) -> tuple[str, ...]:
        """Names of the codes' scales."""
        return tuple(f"{name}_scales" for name in self.moments)

    def of(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the data type of a parameter's moments."""
        return self.dtype or type_of(parameter)

    def counted(self, step: int) -> dict[str, torch.Tensor | int]:
        """Return the state of a step counter in the plain form."""
        if self.counter is None:
            return {}
        return {"step": step if self.counter is int else torch.tensor(float(step))}
