"""The slots of a search on this machine: on which cards, and which have been given up."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack

from autofit.exceptions import WorkerError
from autofit.strategies import Hardware
from autofit.tuning.cards import choose
from autofit.tuning.options import SearchOptions
from autofit.worker import meter
from autofit.worker.cluster.pool import Pool
from autofit.worker.cluster.versions import versions
from autofit.worker.records.trials import LaunchEnded

CPU_SLOTS = 1
"""Trials side by side would disturb one another's times."""
TAKEN = 5
"""Launches that others may take the memory from before the search gives up."""

BLIND = (
    "NVML is missing, so that the memory of other processes is unknown."
    " The search takes the whole card to be free."
)

Say = Callable[[str], None]


class LocalSlots:
    """Knows what a search runs on, and starts its workers when the first is needed.

    Raises ``UsageError`` where the devices asked for are not there or not free enough.
    """

    def __init__(self, options: SearchOptions) -> None:
        self._options = options
        self._pool: Pool | None = None
        self._cards: tuple[meter.Card, ...] = ()
        self._lost: dict[int, str] = {}
        self.interrupted = 0
        """Launches that others took the memory from."""
        self.lines: tuple[str, ...] = ()
        """What there is to say of the devices before anything is started."""
        self.versions = versions()
        """Of what the trials run with."""
        self.device = meter.default_device()
        self.hardware: Hardware
        self.free: int
        """Bytes nobody holds for each rank, at least."""
        self.ranks = options.gpus_per_trial or 1
        """Processes of each launch, which share the machine's memory where there is no GPU."""
        if self.device == "cuda":
            self._choose()
        else:
            meter.require_cap(self.device)
            self.count = CPU_SLOTS
            if options.gpus is not None:
                self.lines = (
                    f"--gpus {options.gpus}: no GPU is visible. The search uses the CPU.",
                )
            self.hardware = meter.hardware(self.device)
            self.free = meter.free_bytes(self.device) // self.ranks

    def _choose(self) -> None:
        each = self.ranks
        found = choose(meter.cards(), self._options.gpus or each, self._options.memory)
        self.lines = found.lines
        if not found.cards[0].measured:
            self.lines += (BLIND,)
        self.hardware = found.cards[0].hardware
        self.free = min(card.free for card in found.cards)
        if len(found.cards) < each:
            raise WorkerError(f"--gpus-per-trial {each}: {'; '.join(found.lines)}")
        self.count = len(found.cards) // each
        self._cards = found.cards

    @property
    def devices(self) -> int:
        """How many devices trials run on; ranks without GPUs share the one machine."""
        return self.count * (self.ranks if self.device == "cuda" else 1)

    def workers(self, stack: ExitStack) -> Pool:
        """Return the pool; it is started by the first call, and left with ``stack``.

        Raises ``WorkerError`` when every slot has been given up.
        """
        if len(self._lost) == self.count:
            raise self._none_left()
        if self._pool is None:
            pool = Pool(
                self.count,
                self.device,
                gpus=self.ranks,
                cards=[card.entry for card in self._cards],
            )
            self._pool = stack.enter_context(pool)
        return self._pool

    def _none_left(self) -> WorkerError:
        return WorkerError(
            f"no device is left: {'; '.join(dict.fromkeys(self._lost.values()))}."
            " Finished trials are stored; the same command continues from there"
        )

    def update(self, say: Say, *, idle: bool) -> bool:
        """Take note of workers that have come and gone, where they can; ``idle``: nothing runs.

        Return whether to call again, because one is waited for.
        """
        return False

    def label(self, slot: int) -> str:
        """Return which card a slot has, where there is more than one slot."""
        return self._pool.labels[slot] if self._pool is not None and self.count > 1 else ""

    def idle(self, busy: Collection[int]) -> list[int]:
        """Return the slots that are not ``busy``, those given up only where no other is left."""
        slots = [slot for slot in range(self.count) if slot not in busy]
        gone = len(self._lost) == self.count  # then whoever has work for one hears of it
        return [slot for slot in slots if gone or slot not in self._lost]

    def _give_up(self, slot: int, why: str) -> None:
        self._lost[slot] = why

    def handle_end(self, slot: int, ended: LaunchEnded, say: Say) -> bool:
        """Return whether a launch ended for the sake of its card, and give up one that is lost.

        Raises ``WorkerError`` when others take the memory again and again.
        """
        if ended.taken:
            self.interrupted += 1
            say(f"{ended.taken}. Its plan is tried again.")
        if ended.lost:
            self._give_up(slot, ended.lost)
            say(f"{ended.lost}. The search does not use it any more.")
        if self.interrupted > TAKEN:
            raise WorkerError(
                f"other processes keep taking the memory: {ended.taken or ended.lost}"
            )
        return bool(ended.taken or ended.lost)
