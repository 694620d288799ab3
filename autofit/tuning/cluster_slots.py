"""The slots of a search on a Ray cluster, whose machines may join and leave."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack

from autofit.exceptions import UsageError, WorkerError
from autofit.facts import HOST
from autofit.tuning.cards import SHARE, WHOLE
from autofit.tuning.local_slots import LocalSlots, Say
from autofit.tuning.options import SearchOptions
from autofit.units import format_size
from autofit.worker.cluster import nodes
from autofit.worker.cluster.actor import Found
from autofit.worker.cluster.cluster_pool import Arrival, ClusterPool
from autofit.worker.cluster.nodes import ClusterNode, Places
from autofit.worker.cluster.reservation import Reservation
from autofit.worker.cluster.versions import obstacles, of_node, remarks
from autofit.worker.launch.guard import who
from autofit.worker.records.trials import LaunchRequest

QUERY_SECONDS = 5.0
"""Seconds between two queries for the machines of the cluster."""
FIRST_WORKER_SECONDS = 120.0
"""Seconds to wait for the first worker."""
MORE_WORKERS_SECONDS = 20.0
"""Seconds to wait for more workers after the first. Later ones join the running search."""
_PAUSE = 0.5
ONE_EACH = "Each training runs on one GPU: on a cluster, a search does not spread it over several."
NO_WORKER = (
    f"none started a worker within {FIRST_WORKER_SECONDS:.0f} s;"
    " other jobs may hold the CPUs or GPUs"
)


def open_slots(
    options: SearchOptions, stack: ExitStack, reserved: Reservation | None = None
) -> LocalSlots:
    """Return the slots of a search, on this machine or on the cluster of ``--address``.

    ``reserved``: the devices of that cluster that the search has; by default it takes free ones.
    """
    if options.address is None:
        return LocalSlots(options)
    return ClusterSlots(options, stack, reserved)


class ClusterSlots(LocalSlots):
    """The slots of a search on a cluster. Starts the workers at once; ``stack`` closes them.

    Raises ``UsageError`` if the cluster has too few devices for the options, and ``WorkerError`` if
    the cluster cannot be joined.
    """

    def __init__(
        self, options: SearchOptions, stack: ExitStack, reserved: Reservation | None = None
    ) -> None:
        assert options.address is not None
        self._reserved = reserved
        self._options = options
        self.ranks = options.gpus_per_trial or 1
        self.prepares = False
        self.spread = 1
        self._lost: dict[int, str] = {}
        self.interrupted = 0
        self._own = of_node()
        self._model: Found | None = None
        """A usable worker with the most frequent model of device."""
        self._needed = 0
        """Bytes that each GPU must have free."""
        self._said: set[str] = set()
        self._known: set[int] = set()
        """Slots that were accepted at least once."""
        pool = ClusterPool(options.address, options.script, reserved)
        self._cluster_pool = stack.enter_context(pool)
        pool.open()
        alive = nodes.look()
        self._places: Places = (
            nodes.choose(alive.values(), options.gpus, self.ranks)
            if reserved is None
            else reserved.places()
        )
        self.device = self._places.device
        self._queried_at = time.monotonic()
        self._empty_since: float | None = None
        """When the last slot was lost, by ``time.monotonic``; ``None`` while there is one."""
        self._cluster_pool.settle(self.device, self.ranks)
        self._tried: set[str] = set()
        """Ids of the nodes on which slots were started."""
        self._add(alive, self._places.slots)
        lines = [*self._places.lines]
        if (options.gpus or 1) > 1 and options.gpus_per_trial is None:
            lines.append(ONE_EACH)
        self._wait_for_workers(lines.append)
        self.lines = tuple(lines)

    # --- the beginning ---------------------------------------------------------------------

    def _wait_for_workers(self, say: Say) -> None:
        """Wait for the workers, and derive the study's hardware and budget from their devices."""
        arrived = self._gather()
        found = {slot: each for slot, each in arrived if isinstance(each, Found)}
        usable = (e for e in found.values() if not obstacles(e.versions, self._own, builds=False))
        able = [*usable]
        names = Counter(each.hardware.name for each in able)
        self._model = max(able, key=lambda each: names[each.hardware.name], default=None)
        if self._model is not None and self.device != HOST:
            model = self._model.hardware
            same = [each for each in found.values() if each.hardware.name == model.name]
            self._needed = (
                int(SHARE * max(each.free for each in same))
                if self._options.memory is None
                else min(self._options.memory, int(WHOLE * same[0].hardware.total_bytes))
            )
        for slot, each in arrived:
            self._accept(slot, each, say)
        used = [found[slot] for slot in self._cluster_pool.slots]
        if not used:
            for _, each in arrived:
                if isinstance(each, UsageError):
                    raise each
            why = "; ".join(dict.fromkeys(self._lost.values()))
            raise WorkerError(f"no machine of the cluster can be used: {why or NO_WORKER}")
        self.hardware = min((each.hardware for each in used), key=lambda h: h.total_bytes)
        self.free = min(each.free for each in used)
        if self.device == HOST:
            self.free //= self.ranks
        self.count = len(used)
        self.versions = dict(used[0].versions)

    def _gather(self) -> list[Arrival]:
        """Wait for the first worker, then for more; return those that arrived or failed."""
        arrived: list[Arrival] = []
        until = time.monotonic() + FIRST_WORKER_SECONDS
        while self._cluster_pool.coming and (left := until - time.monotonic()) > 0:
            arrived += self._cluster_pool.arrivals(left)
            if self._cluster_pool.slots:
                until = min(until, time.monotonic() + MORE_WORKERS_SECONDS)
        return arrived

    # --- which workers are used ------------------------------------------------------------

    def _accept(self, slot: int, arrived: Found | Exception, say: Say) -> bool:
        """Accept a usable slot and return ``True``; give up any other, and say why."""
        if not isinstance(arrived, Found):
            why = f"{self._host(slot)} cannot be used: {arrived}"
        elif reasons := self._obstacles(arrived):
            why = f"{arrived.label} is left out: {', '.join(reasons)}"
        else:
            for remark in remarks(arrived.versions, self._own):
                self._say_if_new(f"{arrived.host}: {remark}", say)
            self._known.add(slot)
            return True
        self._give_up(slot, why)
        self._say_if_new(why, say)
        return False

    def _obstacles(self, found: Found) -> list[str]:
        """Return why a worker cannot be used: its versions, its model or its free memory."""
        reasons = obstacles(found.versions, self._own, builds=False)
        if reasons or self._model is None:
            return reasons
        model = self._model.hardware
        if found.hardware.name != model.name:
            return [f"it is another model, {found.hardware.name}, than {model.name}"]
        for card in found.cards:
            if card.free < self._needed:
                total = format_size(card.hardware.total_bytes)
                return [f"{card.label} has {format_size(card.free)} of {total} free{who(card)}"]
        host = self._model.host
        return obstacles(found.versions, self._model.versions, builds=True, at=f"on {host}")

    def _give_up(self, slot: int, why: str) -> None:
        self._lost[slot] = why
        if self._cluster_pool.where(slot) is not None:
            self._cluster_pool.drop(slot)

    def _host(self, slot: int) -> str:
        node = self._cluster_pool.where(slot)
        return node.host if node is not None else "a machine"

    def _say_if_new(self, line: str, say: Say) -> None:
        if line not in self._said:
            self._said.add(line)
            say(line)

    # --- while the search runs -------------------------------------------------------------

    def update(self, say: Say, *, idle: bool) -> bool:
        """Accept workers that joined and give up machines that left; see ``LocalSlots.update``.

        Returns whether to call again: no launch is running (``idle``), no slot is left, and one may
        still come.
        """
        self._refresh(say)
        if self._cluster_pool.slots or not idle:
            self._empty_since = None
            return False
        now = time.monotonic()
        self._empty_since = self._empty_since or now
        time.sleep(_PAUSE)
        return now - self._empty_since < FIRST_WORKER_SECONDS

    def _refresh(self, say: Say) -> None:
        """Accept new workers, give up machines that left, and start slots on new machines."""
        for slot, arrived in self._cluster_pool.arrivals(0):
            known = slot in self._known
            if self._accept(slot, arrived, say) and not known:
                say(f"{self._cluster_pool.labels[slot]} has joined the search")
        if time.monotonic() - self._queried_at < QUERY_SECONDS:
            return
        self._queried_at = time.monotonic()
        alive = nodes.look()
        for slot in self._cluster_pool.gone(set(alive)):
            why = (
                f"{self._host(slot)} is gone from the cluster. The search does not use it any more."
            )
            self._give_up(slot, why)
            say(why)
        if self._reserved is not None:
            return
        new = [node for node in alive.values() if node.id not in self._tried]
        gpus = self._options.gpus
        left = None if gpus is None else gpus // self.ranks - self._cluster_pool.size
        self._add(alive, nodes.more(self._places, new, self.ranks, left))

    def _add(self, alive: Mapping[str, ClusterNode], counts: Mapping[str, int]) -> None:
        for node, count in counts.items():
            self._cluster_pool.add(alive[node], count)
        self._tried |= counts.keys()

    def begin(self, stack: ExitStack, first: LaunchRequest) -> bool:
        """Do nothing: the workers have started."""
        return False

    def workers(self, stack: ExitStack) -> ClusterPool:
        """Return the pool of workers; raise ``WorkerError`` if no slot is left."""
        if not self._cluster_pool.slots:
            raise self._none_left()
        return self._cluster_pool

    def label(self, slot: int) -> str:
        """Return the name of a slot's device; empty if there is one slot."""
        return self._cluster_pool.labels[slot] if len(self._cluster_pool.slots) > 1 else ""

    def idle(self, busy: Collection[int]) -> list[int]:
        """Return the slots that are not ``busy``.

        If nothing runs and no slot is left, it is ``[0]``, so that the next launch raises
        ``WorkerError``.
        """
        if not busy and not self._cluster_pool.slots:
            return [0]
        return [slot for slot in self._cluster_pool.slots if slot not in busy]
