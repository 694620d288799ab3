"""Common GPUs: their memory and capability, and which of them a script would fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autofit.exceptions import UsageError
from autofit.facts import Hardware
from autofit.plan import Plan
from autofit.suggestions import did_you_mean
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

    @property
    def hardware(self) -> Hardware:
        """Return the card as a process would find it."""
        return Hardware(
            device=cuda.KIND.name,
            name=f"NVIDIA {self.name}",
            total_bytes=int(self.memory * GIB),
            capability=self.capability,
        )


MODELS = (
    GpuModel("RTX 3060", 11.6, 360, 12.7, 12.7, 25.5, (8, 6)),
    GpuModel("T4", 14.5, 320, 8.1, 8.1, 65, (7, 5)),
    GpuModel("V100-16GB", 15.8, 900, 15.7, 15.7, 125, (7, 0)),
    GpuModel("L4", 21.9, 300, 30.3, 60, 121, (8, 9)),
    GpuModel("A10", 21.9, 600, 31.2, 62.5, 125, (8, 6)),
    GpuModel("RTX 3090", 23.5, 936, 35.6, 35.6, 71, (8, 6)),
    GpuModel("RTX 4090", 23.5, 1008, 82.6, 82.6, 165, (8, 9)),
    GpuModel("RTX 5090", 31.3, 1792, 105, 105, 210, (12, 0)),
    GpuModel("A100-40GB", 39.3, 1555, 19.5, 156, 312, (8, 0)),
    GpuModel("L40S", 44.3, 864, 91.6, 183, 362, (8, 9)),
    GpuModel("A100-80GB", 79.1, 2039, 19.5, 156, 312, (8, 0)),
    GpuModel("H100", 79.1, 3350, 67, 495, 989, (9, 0)),
    GpuModel("H200", 139.8, 4800, 67, 495, 989, (9, 0)),
    GpuModel("B200", 178.3, 8000, 75, 1125, 2250, (10, 0)),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU, and the plan under which the script fits it."""

    name: str
    size: int
    """Bytes of its memory."""
    plan: Plan | None
    """The predicted fastest plan that fits, at most rounding; ``None`` if none was found."""


def cards(
    candidates: Iterable[tuple[Plan, float]], needed: Callable[[Plan], float]
) -> tuple[Card, ...]:
    """Return each card with the fastest plan that fits it.

    Args:
        candidates: Plans and their step times relative to the script as it is.
        needed: Returns the bytes that a process occupies on the device under a plan.
    """
    fastest = [plan for plan, _ in sorted(candidates, key=lambda each: each[1])]
    peaks: dict[Plan, float] = {}

    def fits(plan: Plan, size: int) -> bool:
        if plan not in peaks:
            peaks[plan] = needed(plan)
        return peaks[plan] <= size * FREE

    found = []
    for model in MODELS:
        size = model.hardware.total_bytes
        plans = (Plan(), *fastest)  # a plan is of interest where the script does not fit as it is
        plan = next((each for each in plans if fits(each, size)), None)
        found.append(Card(name=model.name, size=size, plan=plan))
    return tuple(found)
