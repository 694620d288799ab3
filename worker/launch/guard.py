"""Watches over the cards of a slot, from outside the process measured there. Imports no torch.

Others may use a card too. Memory that they take while a trial runs is not the plan's doing, and
memory that does not come back after a launch makes a card useless for the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from autofit.exceptions import WorkerError
from autofit.units import format_size
from autofit.worker.meter import nvml
from autofit.worker.meter.nvml import Card

BACK_SECONDS = 15.0
"""A killed process has given its memory back by then, unless the driver holds it."""
BRIEFLY = 2.0
"""Seconds after which what is still held is somebody else's."""
NAMED = 3
"""Holders of a card that are named, at most."""
SLACK = 256 << 20
"""Bytes; less than any process with CUDA holds, more than the driver's own books differ by."""
_PAUSE = 0.1


class Guard:
    """Knows what each card had free at first, and sees that a launch finds as much.

    ``look`` returns the slot's cards as they are; it may raise ``WorkerError`` where nobody knows,
    and then nothing is guarded.
    """

    def __init__(self, look: Callable[[], Sequence[Card]]) -> None:
        self._look = look
        self._free = {card.uuid: card.free for card in self._cards()}

    @classmethod
    def of(cls, device: str, environment: Mapping[str, str]) -> Guard:
        """Return the guard of the cards that a process with ``environment`` sees."""
        return cls((lambda: nvml.cards(environment)) if device == "cuda" else tuple)

    def taken(self, room: int, budget: int, beside: Collection[int] = (), index: int = 0) -> bool:
        """Return whether a process with ``room`` on card ``index`` had less than it was promised.

        ``room``: the bytes it held and those nobody did, when an allocation failed. ``beside``: the
        ids of other processes of the same launch, whose memory is the launch's own.
        """
        for card in self._cards()[index : index + 1]:
            promised = min(budget, self._free.get(card.uuid, card.free))
            room += sum(holder.size or 0 for holder in card.holders if holder.pid in beside)
            return room < promised - SLACK
        return False

    def takers(self, own: Collection[int]) -> str:
        """Return a line on who holds the slot's cards, but for the launch's ``own`` processes."""
        return "; ".join(f"{c.label} was taken meanwhile{who(c, but=own)}" for c in self._cards())

    def wait(self, budget: int, seconds: float | None = None) -> str:
        """Wait until every card has ``budget`` bytes free, or as much as at first.

        Returns what is wrong with the first that has not, after ``seconds`` (``BACK_SECONDS`` when
        not given); else nothing.
        """
        deadline = time.monotonic() + (BACK_SECONDS if seconds is None else seconds)
        while short := [card for card in self._cards() if self._short(card, budget)]:
            if time.monotonic() > deadline:
                return f"{short[0].label} has {format_size(short[0].free)} free{who(short[0])}"
            time.sleep(_PAUSE)
        return ""

    def _short(self, card: Card, budget: int) -> bool:
        return card.free < min(budget, self._free.get(card.uuid, card.free)) - SLACK

    def _cards(self) -> Sequence[Card]:
        try:
            return self._look()
        except WorkerError:
            return ()


def who(card: Card, *, but: Collection[int] = ()) -> str:
    """Return who holds a card's memory, to be put behind what is said of it; maybe nothing.

    ``": process 4711 (python) holds 100.0 GiB"``. ``but``: processes to leave out.
    """
    sizes = {holder: holder.size or 0 for holder in card.holders if holder.size}
    others = [holder for holder in sizes if holder.pid not in but][:NAMED]
    said = [
        f"process {each.pid}{f' ({each.name})' if each.name else ''} "
        f"holds {format_size(sizes[each])}"
        for each in others
    ]
    rest = card.held - sum(sizes[each] for each in sizes if each in others or each.pid in but)
    if rest > SLACK:
        unnamed = "others hold" if said else "processes that the driver does not name here hold"
        said.append(f"{unnamed} {format_size(rest)}")
    return f": {', '.join(said)}" if said else ""
