"""Which of the machine's cards a search uses: pure functions, cards in, cards and lines out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autofit.exceptions import UsageError
from autofit.units import format_size
from autofit.worker.launch.guard import SLACK, who
from autofit.worker.meter import Card

SHARE = 0.9
"""Of what the freest card has free: a card with less would lower the budget on all of them."""
WHOLE = 0.95
"""Of a card's memory: the driver keeps the rest to itself, or nearly so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a search uses."""

    cards: tuple[Card, ...]
    lines: tuple[str, ...]
    """For people: who else is on these cards, and which are left out."""


def choose(cards: Sequence[Card], asked: int, memory: int | None) -> Choice:
    """Return ``asked`` of the visible ``cards`` that are free enough, all of one model.

    ``memory``: bytes that each must have free; ``None`` for about as much as the freest has.
    Fewer are chosen when the others are too busy. Raises ``UsageError`` when there are not as many,
    or not one is free enough.
    """
    if len(cards) < asked:
        raise UsageError(f"--gpus {asked}: {len(cards)} are visible here; ask for fewer")
    freest = max(card.free for card in cards)
    chosen: list[Card] = []
    lines: list[str] = []
    for card in cards:
        if len(chosen) == asked:
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
            f"--memory {format_size(memory or 0)}: no GPU has as much free; ask for less. "
            + "; ".join(lines)
        )
    return Choice(cards=tuple(chosen), lines=tuple(lines))
