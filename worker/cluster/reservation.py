"""Reserves the devices of one search on a Ray cluster, before the search starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.exceptions import UsageError
from autofit.facts import HOST
from autofit.worker.cluster import nodes
from autofit.worker.cluster.actor import share, without_ray
from autofit.worker.cluster.nodes import Places
from autofit.worker.meter import ON_RAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A placement group with one bundle for each slot of a search.

    Ray removes the group when the actor ends that has made it.
    """

    group: Any
    """Ray's placement group."""
    slots: int
    each: int
    """GPUs of each slot; 0 on the CPU."""
    model: str
    """Ray's name of the GPUs; empty if there are none."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The environment of trials: that of this machine, without Ray's variables."""
    uid: int | None = None
    """Under which trials run; ``None`` for that of Ray's workers."""

    @property
    def name(self) -> str:
        """The reserved devices, for messages: ``"2 GPUs (H100)"``."""
        if not self.each:
            return "a CPU"
        count = self.slots * self.each
        return f"{count} GPU{'s' if count > 1 else ''}" + (f" ({self.model})" if self.model else "")

    def ready(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until Ray has reserved the devices; return whether it has."""
        return bool(self.group.wait(seconds))

    def bundles(self) -> dict[str, list[int]]:
        """Return the numbers of the bundles on each node, by the node's id."""
        from ray.util import placement_group_table

        found: dict[str, list[int]] = {}
        table: Any = placement_group_table(self.group)
        for number, node in sorted(table["bundles_to_node_id"].items()):
            found.setdefault(node, []).append(number)
        return found

    def places(self) -> Places:
        """Return where the trials of the search run."""
        counts = {node: len(numbers) for node, numbers in self.bundles().items()}
        device = ON_RAY if self.each else HOST
        return Places(device=device, model=self.model, slots=counts)


def reserve(
    gpus: int | None, each: int, environment: Mapping[str, str], *, uid: int | None = None
) -> Reservation:
    """Ask Ray for the devices of a search, and return at once; the process has joined Ray.

    ``gpus``: GPUs of the search, by default ``each``; ``each``: GPUs that a training spans;
    ``environment``: that of this process; ``uid``: under which trials run. On a cluster without
    GPUs, a search gets one CPU and its share of the cores. Raises ``UsageError`` if the cluster has
    too few GPUs.
    """
    from ray.util import placement_group

    alive = nodes.look().values()
    places = nodes.choose(alive, None if not any(n.gpus for n in alive) else gpus or each, each)
    environment = without_ray(environment)
    if places.device == HOST:
        threads = share(max(node.cpus for node in alive))
        environment = {**environment, "OMP_NUM_THREADS": threads}
        group = placement_group([{"CPU": 1}])
        return Reservation(group=group, slots=1, each=0, model="", environment=environment, uid=uid)
    slots = (gpus or each) // each
    if slots == 0:
        raise UsageError(f"--gpus {gpus} --gpus-per-trial {each}: a training has too few GPUs")
    bundle: dict[str, float] = {"GPU": each}
    if places.model:
        bundle[f"{nodes.MODEL}{places.model}"] = 0.001
    group = placement_group([dict(bundle) for _ in range(slots)])
    return Reservation(
        group=group,
        slots=slots,
        each=each,
        model=places.model,
        environment=environment,
        uid=uid,
    )
