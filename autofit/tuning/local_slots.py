"""The slots of a search on this machine: the devices on which trials run in parallel."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack

from autofit.exceptions import UsageError, WorkerError
from autofit.facts import HOST
from autofit.strategies import RANKS, Hardware
from autofit.tuning.cards import choose
from autofit.tuning.options import SearchOptions
from autofit.worker import meter
from autofit.worker.cluster.pool import Pool
from autofit.worker.cluster.versions import versions
from autofit.worker.records.trials import LaunchEnded, LaunchRequest

CPU_SLOTS = 1
"""Slots on the CPU. Parallel trials would disturb one another's step times."""
NOT_PREPARED_ON = frozenset({HOST})
"""Devices on which no process is prepared beside a running launch.

On the CPU it would compute where the launch is measured.
"""
MAX_INTERRUPTED = 5
"""Launches that may lose their memory to other processes before the search gives up."""

BLIND = (
    "NVML is missing, so the memory of other processes is unknown."
    " The search assumes that the whole GPU is free."
)

ONE_FIRST = (
    "The search first runs each trial on one device, then tries the best plan on up to {0}"
    " (not with --gpus-per-trial 1)."
)

Say = Callable[[str], None]


class LocalSlots:
    """The slots of a search on this machine.

    Raises ``UsageError`` if the requested devices do not exist or have too little free memory.
    """

    def __init__(self, options: SearchOptions) -> None:
        self._options = options
        self._pool: Pool | None = None
        self._cards: tuple[meter.Card, ...] = ()
        self._lost: dict[int, str] = {}
        """Lost slots, each with the reason."""
        self.interrupted = 0
        """Number of launches that lost their memory to other processes."""
        self.lines: tuple[str, ...] = ()
        """Lines about the devices for the user, to show before the search starts."""
        self.versions = versions()
        """Versions of the packages with which the trials run."""
        self.device = meter.default_device()
        self.hardware: Hardware
        self.free: int
        """Free bytes that each rank has at least."""
        self.ranks = options.gpus_per_trial or 1
        """Processes of each launch. Without a GPU they share the machine's memory."""
        self._each = self.ranks
        """Devices of a slot."""
        self.spread = 1
        """Devices over which the search may spread a training of one process."""
        self.prepares = self.device not in NOT_PREPARED_ON
        """Whether the next process is prepared beside a running launch.

        With several slots, an idle slot starts the script ahead instead.
        """
        if self.device != HOST:
            if options.device is not None:
                raise UsageError(
                    f"--device {options.device}: GPUs are visible; CUDA_VISIBLE_DEVICES='' hides"
                    " them from the search and from the script"
                )
            self._choose()
        else:
            meter.require_cap(self.device)
            self.count = CPU_SLOTS
            if options.gpus is not None and options.device is None:
                raise UsageError(
                    f"--gpus {options.gpus}: no GPU is visible; leave it out, or add --device cpu"
                    f" to spread a training over {options.gpus} processes on the CPU"
                )
            self.spread = self._spread(options.gpus or 1)
            self.hardware = meter.hardware(self.device)
            self.free = meter.free_bytes(self.device) // max(self.ranks, self.spread)
        self.prepares &= self.count == self.ranks == 1
        if self.spread > 1:
            self.lines += (ONE_FIRST.format(self.spread),)

    def _spread(self, devices: int) -> int:
        """Return over how many of ``devices`` the search may spread a training."""
        options = self._options
        name = RANKS
        left_out = name in options.without or (options.only and name not in options.only)
        return 1 if left_out or options.gpus_per_trial is not None else devices

    def _choose(self) -> None:
        each = self.ranks
        cards, lines = choose(meter.cards(), self._options.gpus or each, self._options.memory)
        self.lines = lines if cards[0].measured else (*lines, BLIND)
        self.hardware = cards[0].hardware
        self.free = min(card.free for card in cards)
        if len(cards) < each:
            raise WorkerError(f"--gpus-per-trial {each}: {'; '.join(lines)}")
        self.count = len(cards) // each
        self.spread = self._spread(len(cards))
        self._cards = cards

    @property
    def devices(self) -> int:
        """Number of devices. On the CPU, all ranks of a trial count as one device."""
        return self.count * (self.ranks if self.device != HOST else 1)

    def begin(self, stack: ExitStack, first: LaunchRequest) -> bool:
        """Begin to start the workers; ``stack`` closes them.

        ``first``: the request of the first launch. Its process is started meanwhile, if it has only
        one; returns whether it was.
        """
        return first.processes == 1 and self._begin(stack).prepare_first(first)

    def _begin(self, stack: ExitStack) -> Pool:
        pool = Pool(
            self.count,
            self.device,
            gpus=self._each,
            cards=[card.entry for card in self._cards],
            prepares=self.prepares,
        )
        self._pool = stack.enter_context(pool)
        return pool

    def workers(self, stack: ExitStack) -> Pool:
        """Return the pool of workers, once they have started or ``Pool.first_ended``.

        The first call starts them, unless ``begin`` has; ``stack`` closes them.
        Raises ``WorkerError`` if every slot is lost, or if Ray does not start.
        """
        if len(self._lost) == self.count:
            raise self._none_left()
        pool = self._pool or self._begin(stack)
        pool.open()
        return pool

    def span(self) -> None:
        """Make all devices one slot, for trainings that are spread over them.

        No launch may be running.
        """
        self.count, self._each, self._lost = 1, self.spread, {}
        if self._pool is not None:
            self._pool.span(self.spread)

    def _none_left(self) -> WorkerError:
        return WorkerError(
            f"no device is left: {'; '.join(dict.fromkeys(self._lost.values()))}."
            " Finished trials are stored; the same command continues from there"
        )

    def update(self, say: Say, *, idle: bool) -> bool:
        """Handle workers that joined or left; return whether to call again to wait for one.

        On one machine, workers do neither.

        Args:
            say: Receives a line for each change.
            idle: Whether no launch is running.
        """
        return False

    def label(self, slot: int) -> str:
        """Return the name of a slot's device; empty if there is one slot."""
        return self._pool.labels[slot] if self._pool is not None and self.count > 1 else ""

    def idle(self, busy: Collection[int]) -> list[int]:
        """Return the slots that are not ``busy`` and not lost.

        If all are lost, lost slots are returned, so that the next launch raises ``WorkerError``.
        """
        slots = [slot for slot in range(self.count) if slot not in busy]
        all_lost = len(self._lost) == self.count
        return [slot for slot in slots if all_lost or slot not in self._lost]

    def _give_up(self, slot: int, why: str) -> None:
        self._lost[slot] = why

    def handle_end(self, slot: int, ended: LaunchEnded, say: Say) -> bool:
        """Return whether a launch ended because of its device; mark a lost device.

        Raises ``WorkerError`` if other processes took the memory more than ``MAX_INTERRUPTED``
        times.
        """
        if ended.taken:
            self.interrupted += 1
            say(f"{ended.taken}. Its plan is tried again.")
        if ended.lost:
            self._give_up(slot, ended.lost)
            say(f"{ended.lost}. The search does not use it any more.")
        if self.interrupted > MAX_INTERRUPTED:
            raise WorkerError(
                f"other processes keep taking the memory: {ended.taken or ended.lost}"
            )
        return bool(ended.taken or ended.lost)
