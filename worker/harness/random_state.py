"""Random number generators, saved and restored, and the autocast state beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of torch's generators: the CPU's, and the current CUDA device's if in use."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls) -> Self:
        """Save the state."""
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if in_use else None)

    def restore(self) -> None:
        """Set the generators back to this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomState):
            return NotImplemented
        if (self.cuda is None) != (other.cuda is None):
            return False
        same_cuda = self.cuda is None or torch.equal(self.cuda, other.cuda)  # type: ignore[arg-type]
        return same_cuda and torch.equal(self.cpu, other.cpu)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Ambient:
    """The script's own autocast state around a call, entered again when the call is repeated."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> Self:
        """Save the state, for the CPU and for CUDA where there is one."""
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return cls(
            tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in devices
            )
        )

    @property
    def half(self) -> bool:
        """Whether autocast is on, to float16: what needs its loss scaled."""
        return any(enabled and dtype is torch.float16 for _, enabled, dtype in self.autocast)

    def off(self) -> Self:
        """Return the same with autocast switched off: how a backward pass wants it."""
        return type(self)(tuple((device, False, dtype) for device, _, dtype in self.autocast))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Enter the same autocast state."""
        with ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            yield
