"""The slots of a search on a cluster: which machines are used, which join, which are gone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack

from autofit.exceptions import UsageError, WorkerError
from autofit.tuning.cards import SHARE, WHOLE
from autofit.tuning.local_slots import LocalSlots, Say
from autofit.tuning.options import SearchOptions
from autofit.units import format_size
from autofit.worker.cluster import nodes
from autofit.worker.cluster.actor import Found
from autofit.worker.cluster.cluster_pool import Arrival, ClusterPool
from autofit.worker.cluster.nodes import Node, Places
from autofit.worker.cluster.versions import obstacles, of_node, remarks
from autofit.worker.launch.guard import who

LOOK = 5.0
"""Seconds between two looks at which machines there are."""
FIRST = 120.0
"""Seconds a cluster is given to start a worker where there is none."""
OTHERS = 20.0
"""Seconds, once there is a worker, for which the others are waited for; late ones join then."""
_PAUSE = 0.5
NOBODY = f"none started a worker within {FIRST:.0f} s; other jobs may hold the CPUs or GPUs"


def open_slots(options: SearchOptions, stack: ExitStack) -> LocalSlots:
    """Return the crew of a search: of this machine, or of the cluster it was given."""
    return LocalSlots(options) if options.address is None else ClusterSlots(options, stack)


class ClusterSlots(LocalSlots):
    """Knows what a search on a cluster runs on; the workers are started at once, and say it.

    They are left with ``stack``. Raises ``UsageError`` where the cluster has no room for what was
    asked, ``WorkerError`` where it cannot be joined.
    """

    def __init__(self, options: SearchOptions, stack: ExitStack) -> None:
        assert options.address is not None
        self._options = options
        self.ranks = options.gpus_per_trial or 1
        self._lost: dict[int, str] = {}
        self.interrupted = 0
        self._own = of_node()
        self._model: Found | None = None
        self._needed = 0
        self._remarked: set[str] = set()
        self._known: set[int] = set()
        """Slots that have been used."""
        self._cluster_pool = stack.enter_context(ClusterPool(options.address, options.script))
        alive = nodes.look()
        self._places: Places = nodes.choose(alive.values(), options.gpus, self.ranks)
        self.device = self._places.device
        self._looked = time.monotonic()
        self._deserted: float | None = None
        """When the last slot was lost."""
        self._cluster_pool.settle(self.device, self.ranks)
        self._tried: set[str] = set()
        """Nodes, by id, that have been used, or were to be."""
        self._add(alive, self._places.slots)
        lines = [*self._places.lines]
        self._open(lines.append)
        self.lines = tuple(lines)

    # --- the beginning ---------------------------------------------------------------------

    def _open(self, say: Say) -> None:
        """Wait for the workers, and settle by what they find what the study is of."""
        arrived = self._gather()
        found = {slot: each for slot, each in arrived if isinstance(each, Found)}
        self._model = self._typical([*found.values()])
        if self._model is not None and self.device == "cuda":
            same = [e for e in found.values() if e.hardware.name == self._model.hardware.name]
            self._needed = self._least(same)
        for slot, each in arrived:
            self._welcome(slot, each, say)
        used = [found[slot] for slot in self._cluster_pool.slots]
        if not used:
            for _, each in arrived:
                if isinstance(each, UsageError):
                    raise each
            why = "; ".join(dict.fromkeys(self._lost.values()))
            raise WorkerError(f"no machine of the cluster can be used: {why or NOBODY}")
        self.hardware = min((each.hardware for each in used), key=lambda h: h.total_bytes)
        self.free = min(each.free for each in used)
        if self.device == "cpu":
            self.free //= self.ranks
        self.count = len(used)
        self.versions = dict(used[0].versions)

    def _gather(self) -> list[Arrival]:
        """Return what has become of the workers, once most can be expected to be there."""
        arrived: list[Arrival] = []
        until = time.monotonic() + FIRST
        while self._cluster_pool.coming and (left := until - time.monotonic()) > 0:
            arrived += self._cluster_pool.arrivals(left)
            if self._cluster_pool.slots:
                until = min(until, time.monotonic() + OTHERS)
        return arrived

    def _typical(self, found: list[Found]) -> Found | None:
        """Return one of those that can be used and are most alike."""
        able = [each for each in found if not obstacles(each.versions, self._own, builds=False)]
        names = Counter(each.hardware.name for each in able)
        return max(able, key=lambda each: names[each.hardware.name], default=None)

    def _least(self, found: list[Found]) -> int:
        """Return the bytes that every card must have free, of cards that are alike."""
        if self._options.memory is None:
            return int(SHARE * max(each.free for each in found))
        return min(self._options.memory, int(WHOLE * found[0].hardware.total_bytes))

    # --- who may stay ----------------------------------------------------------------------

    def _welcome(self, slot: int, arrived: Found | Exception, say: Say) -> bool:
        """Keep a slot that can be used; give up one that cannot, and say why."""
        if not isinstance(arrived, Found):
            why = f"{self._host(slot)} cannot be used: {arrived}"
        elif objections := self._objections(arrived):
            why = f"{arrived.label} is left out: {', '.join(objections)}"
        else:
            for remark in remarks(arrived.versions, self._own):
                self._say_unless_said(f"{arrived.host}: {remark}", say)
            self._known.add(slot)
            return True
        self._give_up(slot, why)
        self._say_unless_said(why, say)
        return False

    def _objections(self, found: Found) -> list[str]:
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

    def _say_unless_said(self, line: str, say: Say) -> None:
        if line not in self._remarked:
            self._remarked.add(line)
            say(line)

    # --- while the search runs -------------------------------------------------------------

    def update(self, say: Say, *, idle: bool) -> bool:
        """Take in what has come, give up what is gone; each is said.

        Return whether to call again: nothing runs (``idle``), no slot is left, one may yet come.
        """
        self._take_in(say)
        if self._cluster_pool.slots or not idle:
            self._deserted = None
            return False
        now = time.monotonic()
        self._deserted = self._deserted or now
        time.sleep(_PAUSE)
        return now - self._deserted < FIRST

    def _take_in(self, say: Say) -> None:
        for slot, arrived in self._cluster_pool.arrivals(0):
            back = slot in self._known
            if self._welcome(slot, arrived, say) and not back:
                say(f"{self._cluster_pool.labels[slot]} has joined the search")
        if time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        alive = nodes.look()
        for slot in self._cluster_pool.gone(set(alive)):
            why = (
                f"{self._host(slot)} is gone from the cluster. The search does not use it any more."
            )
            self._give_up(slot, why)
            say(why)
        new = [node for node in alive.values() if node.id not in self._tried]
        asked = self._options.gpus
        left = None if asked is None else asked // self.ranks - self._cluster_pool.size
        self._add(alive, nodes.more(self._places, new, self.ranks, left))

    def _add(self, alive: Mapping[str, Node], counts: Mapping[str, int]) -> None:
        for node, count in counts.items():
            self._cluster_pool.add(alive[node], count)
        self._tried |= counts.keys()

    def workers(self, stack: ExitStack) -> ClusterPool:
        """Return the fleet; raise ``WorkerError`` when no machine of it is left."""
        if not self._cluster_pool.slots:
            raise self._none_left()
        return self._cluster_pool

    def label(self, slot: int) -> str:
        """Return what a slot sits on, where there is more than one."""
        return self._cluster_pool.labels[slot] if len(self._cluster_pool.slots) > 1 else ""

    def idle(self, busy: Collection[int]) -> list[int]:
        """Return the slots that are not ``busy``; any, where nothing runs and none is left."""
        gone = (
            not busy and not self._cluster_pool.slots
        )  # then whoever has work for one hears of it
        return [0] if gone else [slot for slot in self._cluster_pool.slots if slot not in busy]
