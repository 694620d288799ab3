"""Memory of common GPUs, and which of them a script would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autofit.plan import Plan

GIB = 1 << 30
CARDS: tuple[tuple[str, float], ...] = (
    ("RTX 3060", 11.6),
    ("T4", 14.5),
    ("L4, A10", 21.9),
    ("RTX 3090, RTX 4090", 23.5),
    ("RTX 5090", 31.3),
    ("A100 40 GB", 39.3),
    ("L40S", 44.3),
    ("A100 80 GB, H100", 79.1),
    ("H200", 139.8),
    ("B200", 178.3),
)
"""Names and the GiB that torch reports of them, the smallest first.

NVIDIA's data sheets name round sizes; the driver and error correction keep some of that memory.
"""
FREE = 0.95
"""Share of a card that a script may use: the headroom of a search is 5 %."""


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
    for name, gib in CARDS:
        size = int(gib * GIB)
        plans = (Plan(), *fastest)  # a plan is of interest where the script does not fit as it is
        plan = next((each for each in plans if fits(each, size)), None)
        found.append(Card(name=name, size=size, plan=plan))
    return tuple(found)
