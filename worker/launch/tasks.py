"""Prepares what each process of a launch is started with, and where it runs. Imports no torch.

A launch has one process, the ranks of a launcher (``environment``), or replicas of a
single-process script that train as one. The script must not notice the other replicas, so its
environment has none of the variables of ``torchrun``. Each replica sees one GPU. The replicas find
one another by ``ChildSpec.meeting``, and may run on several hosts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from autofit.exceptions import UsageError
from autofit.worker import meter
from autofit.worker.launch.child import Message, Tail
from autofit.worker.launch.environment import THREADS, environment, free_port
from autofit.worker.records.trials import LOOPBACK, ChildSpec, Event, Meeting

HASH_SEED = "PYTHONHASHSEED"
_SEEDS = 1 << 31


class Rank(Protocol):
    """A process of a launch, as its parent sees it: a ``Child``, or a rank on another host."""

    rank: int
    tail: Tail
    """The last lines that it printed."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Its process id; none if it runs on another host."""

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the signal that ended it; ``None`` if this object killed it."""

    def events(self) -> Iterator[Event]:
        """Yield its events until it has ended."""

    def answer(self, answer: Message) -> None:
        """Send it the answer that it is waiting for."""

    def signal(self, number: int) -> None:
        """Send it a signal; do nothing if it has ended."""

    def kill(self) -> bool:
        """Kill it without waiting; return ``False`` if it had ended."""

    def end(self) -> None:
        """Kill it and free what this object holds of it."""


class Host(Protocol):
    """Another host, on which one rank can run."""

    def start(self, spec: ChildSpec, environment: Mapping[str, str]) -> Rank:
        """Start a rank; raise ``WorkerError`` if the host is known to be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of all ranks that a launch may have."""

    address: str
    """Address of rank 0's host, at which the others reach it."""
    ranks: tuple[Host | None, ...]
    """Where each rank runs; ``None`` for this host, which has the first ranks."""
    free: int
    """Free bytes of the device that has least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """What one process of a launch is started with."""

    spec: ChildSpec
    environment: Mapping[str, str]
    host: Host | None = None
    """Where it runs; ``None`` for this host."""


def tasks(
    spec: ChildSpec, variables: Mapping[str, str], hosts: Hosts | None = None
) -> list[RankTask]:
    """Return the task of each process of ``spec.request``, whose environment has ``variables``.

    If ``spec`` has a scratch folder, each replica gets a folder of its own in it. A replica on
    another host gets its GPU there. Raises ``UsageError`` if there are fewer GPUs than replicas.
    """
    count = spec.request.ranks
    if spec.request.replicas > 1:
        return _replicas(spec, variables, hosts)
    if count == 1:
        return [RankTask(spec=spec, environment=variables)]
    port = free_port()
    return [
        RankTask(
            spec=replace(spec, rank=rank), environment=environment(rank, count, port, variables)
        )
        for rank in range(count)
    ]


def _replicas(spec: ChildSpec, variables: Mapping[str, str], hosts: Hosts | None) -> list[RankTask]:
    count = spec.request.replicas
    places = hosts.ranks if hosts is not None else (None,) * count
    if len(places) < count:
        raise UsageError(f"{count} ranks need as many devices, and {len(places)} are reserved")
    here = sum(host is None for host in places[:count])
    seed = 0 if spec.mode == "trial" else random.SystemRandom().randrange(_SEEDS)
    address = hosts.address if hosts is not None else LOOPBACK
    meeting = Meeting(address=address, port=free_port(), seed=seed)
    common = {THREADS: "1", HASH_SEED: str(seed), **variables}
    shown = [common] * count
    of_device = meter.kind(spec.request.device)
    if not of_device.on_host:
        cards = of_device.measured_cards(variables)
        if len(cards) < here:
            raise UsageError(
                f"{here} ranks need {here} GPUs, and {len(cards)} are visible: plan fewer"
            )
        shown[:here] = [{**common, **of_device.visible_only([card.entry])} for card in cards[:here]]
    return [
        RankTask(
            spec=replace(spec, rank=rank, meeting=meeting, scratch=_folder(spec.scratch, rank)),
            environment=shown[rank],
            host=places[rank],
        )
        for rank in range(count)
    ]


def _folder(scratch: str | None, rank: int) -> str | None:
    """Return a new folder in ``scratch``; ``None`` without one."""
    if scratch is None:
        return None
    folder = Path(scratch, f"rank{rank}")
    folder.mkdir()
    return str(folder)
