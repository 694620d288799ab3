"""The GPUs of a service's cluster, and who holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from autofit.storage import Queue
from autofit.worker.cluster.nodes import ClusterNode
from autofit.worker.meter import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine of the cluster."""

    host: str
    gpus: int
    model: str
    """Ray's name of the GPUs, such as ``"H100"``; empty if it does not know it."""
    loads: tuple[Load, ...]
    """How much each of them is used now; empty if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A running search."""

    user: str
    search: int
    gpus: int
    """GPUs that it holds; on a cluster without GPUs, 1 stands for a CPU."""
    since: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusAnswer:
    """The GPUs of the cluster, and who holds them."""

    machines: list[Machine]
    holders: list[Holder]

    @property
    def total(self) -> int:
        """All GPUs of the cluster."""
        return sum(each.gpus for each in self.machines)

    @property
    def held(self) -> int:
        """The GPUs that searches hold."""
        return sum(each.gpus for each in self.holders) if self.total else 0


class Gpus:
    """Looks at the cluster and the queue at each call."""

    def __init__(self, queue: Queue, machines: Callable[[], Iterable[ClusterNode]]) -> None:
        self._queue = queue
        self._machines = machines

    def look(self) -> GpusAnswer:
        """Return what there is now; raise ``WorkerError`` if Ray has ended."""
        machines = [
            Machine(host=each.host, gpus=each.gpus, model=each.model, loads=each.loads)
            for each in self._machines()
            if each.gpus
        ]
        holders = [
            Holder(user=each.user, search=each.id, gpus=each.gpus, since=each.started)
            for each in self._queue.running()
        ]
        return GpusAnswer(machines=machines, holders=holders)
