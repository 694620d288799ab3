"""The kernels of bitsandbytes: blockwise 8-bit codes, and steps on them.

Importing bitsandbytes initialises CUDA, so it is imported when the first optimizer is changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import torch

from autofit.strategies.base import Stepper
from autofit.strategies.support.optimizers import SMALL, bitsandbytes
from autofit.strategies.weights.split_float32 import type_of

BLOCK = 256
"""Elements that share a scale, fixed by the kernels."""
LARGEST = 2**31 - 1
"""Largest number of elements: the kernels count in 32 bits."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Data types of weights that the kernels support."""

Codes = tuple[torch.Tensor, torch.Tensor]
"""The 8-bit codes of a vector, and its scales."""


@cache
def maps(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of the 256 codes for the first moment (signed) and the second."""
    functional = bitsandbytes()
    signed, unsigned = (functional.create_dynamic_map(signed=each) for each in (True, False))
    return signed.to(device), unsigned.to(device)


def quantise(row: torch.Tensor, values: torch.Tensor) -> Codes:
    """Return the codes and scales of a float32 vector."""
    codes, state = bitsandbytes().quantize_blockwise(row, code=values, blocksize=BLOCK)
    return codes, state.absmax


def dequantise(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the float32 vector of codes and scales."""
    row: torch.Tensor = bitsandbytes().dequantize_blockwise(
        codes, absmax=scales, code=values, blocksize=BLOCK
    )
    return row


def update(
    kernel: str,
    group: dict[str, Any],
    weights: torch.Tensor,
    gradient: torch.Tensor,
    moments: list[Codes],
    step: int,
) -> None:
    """Run a step of ``"adam"`` (two moments) or ``"lion"`` (one) with decoupled weight decay."""
    values = maps(weights.device)
    (first, scale), (second, other) = (*moments, (None, None))[:2]
    beta1, beta2 = group["betas"]
    bitsandbytes().optimizer_update_8bit_blockwise(
        kernel,
        gradient,
        weights,
        first,
        second,
        beta1,
        beta2,
        0.0,
        0.0,
        group.get("eps", 0.0),
        step,
        group["lr"],
        values[0],
        None if second is None else values[1],
        scale,
        other,
        weight_decay=group["weight_decay"],
    )


class on_default_stream:
    """Orders the kernels on CUDA's default stream with torch's current stream."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        devices = {p.device for p in params if p.is_cuda}
        present = [torch.cuda.current_stream(device) for device in devices]
        pairs = [(s, torch.cuda.default_stream(s.device)) for s in present]
        self._streams = [(s, default) for s, default in pairs if s != default]

    def __enter__(self) -> None:
        for present, default in self._streams:
            default.wait_stream(present)

    def __exit__(self, *_: object) -> None:
        for present, default in self._streams:
            present.wait_stream(default)


@cache
def broken(kernel: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a kernel does not work here, or ``None``.

    The result of one step from zeros is known, and is compared.
    """
    try:
        generator = torch.Generator().manual_seed(0)
        gradient = torch.randn(SMALL, generator=generator).to(device, dtype)
        weights = torch.zeros(SMALL, device=device, dtype=dtype)
        group = {"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0}
        codes = [
            (
                torch.zeros(SMALL, dtype=torch.uint8, device=device),
                torch.zeros(SMALL // BLOCK, device=device),
            )
            for _ in range(2 if kernel == "adam" else 1)
        ]
        with on_default_stream([weights]):
            update(kernel, group, weights, gradient, codes, 1)
        expected = -0.5 * gradient.float().sign()
        wrong = float((weights.float() - expected).abs().median()) > 0.01
    except (ImportError, RuntimeError, AttributeError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        return f"bitsandbytes does not work on {device.type}: {first or type(error).__name__}"
    where = f"bitsandbytes {version('bitsandbytes')} on {device.type} in {dtype}"
    return f"{where}: its kernels compute wrong results here" if wrong else None


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
