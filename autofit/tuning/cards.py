"""Selects the GPUs of this machine that a search uses."""

from __future__ import annotations

from collections.abc import Sequence

from autofit.exceptions import UsageError
from autofit.units import format_size
from autofit.worker.launch.guard import SLACK, who
from autofit.worker.meter import Card

SHARE = 0.9
"""Without ``--memory``, a GPU must have this share of the largest free memory of any GPU.

The GPU with the least free memory sets the budget of all."""
WHOLE = 0.95
"""Share of a GPU's memory that processes can use; the driver reserves up to the rest."""


def choose(
    cards: Sequence[Card], count: int, memory: int | None
) -> tuple[tuple[Card, ...], tuple[str, ...]]:
    """Return up to ``count`` of the visible GPUs, and lines for the user.

    They are of one model and have enough free memory. Fewer are chosen if the others have too
    little. The lines tell of GPUs left out, and of other processes on the chosen GPUs.

    Args:
        cards: The visible GPUs.
        count: Number of GPUs to use.
        memory: Bytes that each GPU must have free. ``None`` for a share of the largest free memory.

    Raises:
        UsageError: Fewer than ``count`` GPUs are visible, or none has enough free memory.
    """
    if len(cards) < count:
        raise UsageError(f"--gpus {count}: {len(cards)} are visible here; ask for fewer")
    freest = max(card.free for card in cards)
    chosen: list[Card] = []
    lines: list[str] = []
    for card in cards:
        if len(chosen) == count:
            break
        model = chosen[0].hardware.name if chosen else card.hardware.name
        needed = (
            SHARE * freest if memory is None else min(memory, WHOLE * card.hardware.total_bytes)
        )
        state = f"{format_size(card.free)} of {format_size(card.hardware.total_bytes)} free"
        if card.free < needed:
            lines.append(f"{card.label} is left out, {state}{who(card)}")
        elif card.hardware.name != model:
            lines.append(f"{card.label} is left out: it is another model, {card.hardware.name}")
        else:
            chosen.append(card)
            if card.held > SLACK:
                lines.append(f"{card.label}: {state}{who(card)}")
    if not chosen:
        raise UsageError(
            f"--memory {format_size(memory or 0)}: no GPU has this much free memory; ask for less. "
            + "; ".join(lines)
        )
    return tuple(chosen), tuple(lines)
