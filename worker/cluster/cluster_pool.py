"""A pool of slots on the machines of a Ray cluster, which may join and leave."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from typing import Any

from autofit.exceptions import UsageError, WorkerError
from autofit.facts import HOST
from autofit.worker.cluster import archive
from autofit.worker.cluster.actor import ActorSetting, Found, in_copied_folder
from autofit.worker.cluster.local_ray import RaySession
from autofit.worker.cluster.nodes import ClusterNode, look
from autofit.worker.cluster.pool import Pool, first_line
from autofit.worker.cluster.reservation import Reservation
from autofit.worker.records.trials import Script

_ATTEMPTS = 3
"""How often an actor is started for a slot before the pool gives the slot up."""

Arrival = tuple[int, Found | WorkerError | UsageError]
"""A slot, and either its machine and devices or the error for which the slot is given up."""


class ClusterPool(Pool):
    """A pool on the Ray cluster at ``address``; a context manager.

    Call ``settle`` to choose the device and ``add`` to start slots. ``script``: the script that
    will run. A machine that does not see its working directory gets a copy. Every other machine
    gets autofit's own code, so that all run the same version.
    With ``reserved``, the slots are the bundles of that reservation.
    Entering raises ``WorkerError`` if the cluster cannot be joined.
    """

    def __init__(self, address: str, script: Script, reserved: Reservation | None = None) -> None:
        super().__init__(0)
        self._reserved = reserved
        if reserved is not None:
            self._environment = dict(reserved.environment)
        self._bundles: dict[int, int] = {}
        """Number of each slot's bundle in the reservation."""
        self.slots: list[int] = []
        self._script = script
        self._folder = archive.identity(script.cwd)
        self._ray = RaySession(address=address)
        self._numbers = itertools.count()
        self._nodes: dict[int, ClusterNode] = {}
        self._failed: Counter[int] = Counter()
        """How often in a row a slot's actor was lost before it had answered."""
        self._beside: dict[str, int] = {}
        """Number of slots that were started on a node, by its id."""
        self._apart: set[str] = set()
        """Ids of the nodes that do not see the working directory."""
        self._sent: dict[str, str] = {}
        """URIs of the uploads in the cluster's store: ``"code"`` and ``"folder"``."""

    def settle(self, device: str, gpus: int) -> None:
        """Set the kind of device of all slots, with ``gpus`` each if it has memory of its own."""
        self._device, self._gpus = device, 0 if device == HOST else gpus

    def add(self, node: ClusterNode, count: int) -> None:
        """Start ``count`` slots on a machine; ``arrivals`` returns them once they are ready."""
        from ray.util import placement_group

        self._beside[node.id] = count
        bundles = self._reserved.bundles()[node.id] if self._reserved else []
        for slot in itertools.islice(self._numbers, count):
            self._nodes[slot] = node
            if self._reserved:
                self._bundles[slot] = bundles.pop(0)
            elif self._gpus:
                bundle = {"GPU": self._gpus, f"node:{node.address}": 0.001}
                self._groups[slot] = placement_group([bundle], strategy="STRICT_PACK")
            self._begin(slot)

    def drop(self, slot: int) -> None:
        """Remove a slot; no launch may be running there whose events are still needed."""
        import ray
        from ray.util import remove_placement_group

        ray.kill(self._actors.pop(slot))
        if slot in self._groups:
            remove_placement_group(self._groups.pop(slot))
        self._coming = {ref: other for ref, other in self._coming.items() if other != slot}
        self._retire(slot)
        del self._nodes[slot]

    @property
    def size(self) -> int:
        """Number of slots, including those that are not ready yet."""
        return len(self._nodes)

    @property
    def coming(self) -> bool:
        """Whether there are slots whose actor has not answered yet."""
        return bool(self._coming)

    def where(self, slot: int) -> ClusterNode | None:
        """Return the machine of a slot; ``None`` if the slot was removed."""
        return self._nodes.get(slot)

    def arrivals(self, timeout: float) -> list[Arrival]:
        """Return the slots that became ready or failed; wait up to ``timeout`` s for the first."""
        import ray

        if not self._coming:
            return []
        ray.wait(list(self._coming), num_returns=1, timeout=timeout)
        ready, _ = ray.wait(list(self._coming), num_returns=len(self._coming), timeout=0)
        found = [self._arrived(self._coming.pop(each), each) for each in ready]
        return [each for each in found if each is not None]

    def gone(self, alive: set[str]) -> list[int]:
        """Return the free slots whose machine's id is no longer among ``alive``."""
        busy = set(self._streams.values())
        return [s for s, node in self._nodes.items() if node.id not in alive and s not in busy]

    def _arrived(self, slot: int, answer: Any) -> Arrival | None:
        import ray

        try:
            found: Found = ray.get(answer)
            if self._is_apart(slot, found):
                ray.kill(self._actors[slot])
                self._begin(slot)
                return None
        except ray.exceptions.RayTaskError as error:
            kind = UsageError if isinstance(error.cause, UsageError) else WorkerError
            return slot, kind(first_line(error.cause))
        except ray.exceptions.RayError as error:
            self._failed[slot] += 1
            if self._failed[slot] < _ATTEMPTS and self._nodes[slot].id in look():
                ray.kill(self._actors[slot])
                self._begin(slot)
                return None
            return slot, WorkerError(first_line(error))
        except (UsageError, WorkerError) as error:  # the working directory cannot be sent
            return slot, error
        self._failed[slot] = 0
        self.slots = sorted([*self.slots, slot])
        self.labels[slot] = found.label
        return slot, found

    def _is_apart(self, slot: int, found: Found) -> bool:
        """Return whether this answer is the first to show that a machine lacks the directory."""
        node = self._nodes[slot].id
        now = archive.identity(self._script.cwd)
        apart = node not in self._apart and not archive.is_seen(found.folder, self._folder, now)
        if apart:
            self._apart.add(node)
        return apart

    def _open(self) -> None:
        pass  # ``add`` starts the actors

    def _begin(self, slot: int) -> None:
        self._actors[slot] = self._start(slot)
        self._coming[self._actors[slot].look.remote(self._script.cwd)] = slot

    def _retire(self, slot: int) -> None:
        self.slots = [other for other in self.slots if other != slot]

    def _replace(self, slot: int) -> None:
        """Restart the actor of a slot if its machine is alive; ``arrivals`` returns it again."""
        import ray

        ray.kill(self._actors[slot])
        self._retire(slot)
        if self._nodes[slot].id in look():
            self._begin(slot)

    def _start(self, slot: int) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = self._nodes[slot]
        apart = node.id in self._apart
        if self._reserved:
            options = self._within(self._reserved.group, self._bundles[slot])
            options["num_cpus"] = 0 if self._gpus else 1
        elif self._gpus:
            options = self._within(self._groups[slot])
        else:
            affinity = NodeAffinitySchedulingStrategy(node.id, soft=False)
            options = {"num_cpus": 1, "scheduling_strategy": affinity}
        carried: dict[str, Any] = {}
        if not node.here:
            carried["py_modules"] = [self._uri("code")]
        if apart:
            carried["working_dir"] = self._uri("folder")
        setting = ActorSetting(
            device=self._device,
            environment=self._environment,
            here=node.here,
            folder=self._script.cwd if apart else None,
            beside=1 if self._gpus > 1 else self._beside[node.id],
            uid=self._reserved.uid if self._reserved else None,
            served=self._reserved is not None,
        )
        return self._actor({**options, "runtime_env": carried}, setting)

    def _uri(self, what: str) -> str:
        """Return the URI of ``"code"`` or ``"folder"``; the first call uploads it."""
        if what not in self._sent and what == "code":
            self._sent[what] = archive.send_code()
        elif what not in self._sent:
            # Raises UsageError if the script is outside.
            in_copied_folder(self._script, self._script.cwd, self._script.cwd)
            self._sent[what] = archive.send_folder(self._script.cwd)
        return self._sent[what]

    def _leave(self) -> None:
        with contextlib.suppress(ConnectionError):  # the cluster may have ended
            super()._leave()
