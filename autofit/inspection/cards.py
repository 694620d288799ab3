"""Common GPUs: their memory, speed and capability."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from autofit.exceptions import UsageError
from autofit.facts import Hardware
from autofit.text import did_you_mean
from autofit.worker.meter.kinds import cuda

GIB = 1 << 30
FREE = 0.95
"""Share of a card that a script may use: the headroom of a search is 5 %."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One kind of GPU.

    Sources: NVIDIA's data sheet of each card; rates are those of dense products with sums in
    float32. Data sheets name round sizes of memory, of which the driver and error correction keep
    some: ``memory`` is what torch reports.
    """

    name: str
    memory: float
    """GiB."""
    bandwidth: float
    """GB/s."""
    float32: float
    """TFLOP/s of products in float32."""
    tf32: float
    """TFLOP/s of products in TF32, or in float32 if it has none."""
    half: float
    """TFLOP/s of products in bfloat16, or in float16 if it has none."""
    capability: tuple[int, int]
    multiprocessors: int

    @property
    def hardware(self) -> Hardware:
        """Return the card as a process would find it."""
        return Hardware(
            device=cuda.KIND.name,
            name=f"NVIDIA {self.name}",
            total_bytes=int(self.memory * GIB),
            capability=self.capability,
            multiprocessors=self.multiprocessors,
        )

    def other(self, size: int, *, half: float) -> GpuModel:
        """Return a card of ``size`` bytes and another speed, whose rates relate as those here."""
        faster = half / self.half
        return replace(
            self,
            name="other card",
            memory=size / GIB,
            bandwidth=faster * self.bandwidth,
            float32=faster * self.float32,
            tf32=faster * self.tf32,
            half=half,
        )


MODELS = (
    GpuModel("RTX 3060", 11.6, 360, 12.7, 12.7, 25.5, (8, 6), 28),
    GpuModel("T4", 14.5, 320, 8.1, 8.1, 65, (7, 5), 40),
    GpuModel("V100-16GB", 15.8, 900, 15.7, 15.7, 125, (7, 0), 80),
    GpuModel("L4", 21.9, 300, 30.3, 60, 121, (8, 9), 58),
    GpuModel("A10", 21.9, 600, 31.2, 62.5, 125, (8, 6), 72),
    GpuModel("RTX 3090", 23.5, 936, 35.6, 35.6, 71, (8, 6), 82),
    GpuModel("RTX 4090", 23.5, 1008, 82.6, 82.6, 165, (8, 9), 128),
    GpuModel("RTX 5090", 31.3, 1792, 105, 105, 210, (12, 0), 170),
    GpuModel("A100-40GB", 39.3, 1555, 19.5, 156, 312, (8, 0), 108),
    GpuModel("L40S", 44.3, 864, 91.6, 183, 362, (8, 9), 142),
    GpuModel("A100-80GB", 79.1, 2039, 19.5, 156, 312, (8, 0), 108),
    GpuModel("H100", 79.1, 3350, 67, 495, 989, (9, 0), 132),
    GpuModel("H200", 139.8, 4800, 67, 495, 989, (9, 0), 132),
    GpuModel("B200", 178.3, 8000, 75, 1125, 2250, (10, 0), 148),
)
"""The smallest memory first."""


def model_named(name: str) -> GpuModel:
    """Return the card that a user names, such as ``"rtx4090"``; raise ``UsageError`` if unknown."""
    wanted = _letters(name)
    found = [each for each in MODELS if _letters(each.name) == wanted]
    found = found or [each for each in MODELS if _letters(each.name).startswith(wanted)]
    if len(found) == 1:
        return found[0]
    names = [each.name for each in found or MODELS]
    hint = ("" if found else did_you_mean(name, names)) or f"write one of {', '.join(names)}"
    raise UsageError(
        f"--gpu {name}: {'several cards' if found else 'no card'} of this name; {hint}"
    )


def models_named(names: str | None) -> tuple[GpuModel, ...]:
    """Return the cards of a list such as ``"T4, A100-40GB"``; without one, all."""
    if names is None:
        return MODELS
    return tuple(model_named(each.strip()) for each in names.split(","))


def _letters(name: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
