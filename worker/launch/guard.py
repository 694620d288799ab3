"""Watches the free memory of a slot's cards from the parent of a launch. Imports no torch.

Processes of other users may allocate on the same card. If memory runs out because of them, the
trial says nothing about its plan. If memory stays occupied after a launch, the card is of no use
for the next launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from autofit.exceptions import WorkerError
from autofit.units import format_size
from autofit.worker.meter import Card, kind

BACK_SECONDS = 15.0
"""Seconds within which the driver frees the memory of a killed process."""
BRIEFLY = 2.0
"""Seconds to wait for memory that a process of this launch may still be giving back."""
NAMED = 3
"""Largest number of processes that a message names."""
SLACK = 256 << 20
"""Tolerance in bytes: less than any process with CUDA holds, more than the driver's own error."""
_PAUSE = 0.1


class Guard:
    """Remembers the free memory of each card and checks that later launches find as much.

    ``look`` returns the present state of the slot's cards. If it raises ``WorkerError``, the
    driver does not answer and the guard checks nothing.
    """

    def __init__(self, look: Callable[[], Sequence[Card]]) -> None:
        self._look = look
        self._free = {card.uuid: card.free for card in self._cards()}

    @classmethod
    def of(cls, device: str, environment: Mapping[str, str]) -> Guard:
        """Return a guard of the cards that are visible to a process with ``environment``."""
        return cls(lambda: kind(device).measured_cards(environment))

    def taken(
        self, available: int, budget: int, beside: Collection[int] = (), index: int = 0
    ) -> bool:
        """Return whether others left a process on card ``index`` less memory than its budget.

        ``available``: bytes that the process held plus free bytes, when an allocation failed.
        ``beside``: ids of other processes of the same launch; their memory counts as its own.
        """
        for card in self._cards()[index : index + 1]:
            promised = min(budget, self._free.get(card.uuid, card.free))
            available += sum(holder.size or 0 for holder in card.holders if holder.pid in beside)
            return available < promised - SLACK
        return False

    def takers(self, own: Collection[int]) -> str:
        """Return a line that names the processes on the slot's cards, except ``own``."""
        return "; ".join(
            f"{c.label}: another process took memory during the trial{who(c, but=own)}"
            for c in self._cards()
        )

    def wait(self, budget: int, seconds: float | None = None) -> str:
        """Wait until every card has ``budget`` bytes free, or as many as at the start.

        Returns an empty string, or after ``seconds`` (default ``BACK_SECONDS``) a line about the
        first card that has less.
        """
        deadline = time.monotonic() + (BACK_SECONDS if seconds is None else seconds)
        while short := [
            card
            for card in self._cards()
            if card.free < min(budget, self._free.get(card.uuid, card.free)) - SLACK
        ]:
            if time.monotonic() > deadline:
                return f"{short[0].label} has {format_size(short[0].free)} free{who(short[0])}"
            time.sleep(_PAUSE)
        return ""

    def _cards(self) -> Sequence[Card]:
        try:
            return self._look()
        except WorkerError:
            return ()


def who(card: Card, *, but: Collection[int] = ()) -> str:
    """Return the end of a message that names the processes on a card; empty if there are none.

    For instance ``": process 4711 (python) holds 100.0 GiB"``. ``but``: ids to leave out.
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
