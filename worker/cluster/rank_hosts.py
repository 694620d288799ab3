"""Reserves the devices of one training's ranks on the hosts of a Ray cluster."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from autofit.exceptions import UsageError, WorkerError
from autofit.facts import HOST
from autofit.worker import meter
from autofit.worker.cluster import archive
from autofit.worker.cluster.actor import ActorSetting, Found, Slot, in_copied_folder
from autofit.worker.cluster.local_ray import RaySession
from autofit.worker.cluster.nodes import MODEL, ClusterNode, look
from autofit.worker.cluster.pool import first_line
from autofit.worker.cluster.remote_rank import RemoteHost, in_bundle
from autofit.worker.cluster.versions import obstacles, of_node, remarks
from autofit.worker.launch.tasks import Hosts
from autofit.worker.records.trials import Script

READY = 60.0
"""Seconds that Ray has to reserve the devices."""
LOOK = 120.0
"""Seconds that the hosts have to start a first worker."""
_NODE = "ray.io/node-id"
"""Label that Ray gives each node."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Reserved devices for the ranks of a training."""

    hosts: Hosts
    environment: Mapping[str, str]
    """The variable that shows a process on this host the GPUs that Ray reserved here."""


@contextmanager
def reserved(address: str, script: Script, device: str, count: int, say: Say) -> Iterator[Placed]:
    """Reserve ``count`` devices of the cluster at ``address`` inside this context.

    Rank 0 gets a device of this host, and Ray packs the others on as few hosts as it can. A host
    that does not see the working directory gets a copy. Raises ``UsageError`` if the cluster has
    too few devices, or if Ray has chosen a host that cannot run the same training.
    """
    user = dict(os.environ)
    with RaySession(address=address):
        import ray
        from ray.util import remove_placement_group

        nodes = look()
        own = nodes[ray.get_runtime_context().get_node_id()]
        check(nodes.values(), own, device, count)
        group = _group(own, device, count)
        try:
            if not group.wait(READY):
                raise UsageError(
                    f"{count} ranks: Ray has not enough free devices, one of them on {own.host};"
                    " wait for other programs, or plan fewer ranks"
                )
            bundles = [(number, nodes[node]) for number, node in _in_order(group, own.id)]
            placing = _Placing(group, bundles, own, device, user)
            yield placing.place(script, say)
        finally:
            remove_placement_group(group)


def check(nodes: Collection[ClusterNode], own: ClusterNode, device: str, count: int) -> None:
    """Raise ``UsageError`` if the cluster has too few devices for ``count`` ranks.

    ``own``: the host of rank 0. All ranks run on GPUs of its model, or on CPUs.
    """
    if device != HOST:
        have = sum(node.gpus for node in nodes if node.model == own.model)
        what = f"x {own.model or 'GPU'}"
        first = own.gpus
    else:
        have, first = sum(node.cpus for node in nodes), own.cpus
        what = "CPU" if have == 1 else "CPUs"
        if any(node.gpus for node in nodes):
            raise UsageError(
                f"rank 0 runs on this host, {own.host}, which has no GPU:"
                " start the run on a host of the cluster that has one"
            )
    if not first:
        raise UsageError(f"rank 0 runs on this host, {own.host}, and Ray has no device on it")
    if have < count:
        raise UsageError(f"{count} ranks: the cluster has {have} {what}; plan fewer ranks")


def _group(own: ClusterNode, device: str, count: int) -> Any:
    """Ask Ray for a placement group with a bundle for each rank, the first on this host."""
    from ray.util import placement_group

    on_gpus = device != HOST
    bundle: dict[str, float] = {"GPU" if on_gpus else "CPU": 1}
    if on_gpus and own.model:
        bundle[f"{MODEL}{own.model}"] = 0.001
    return placement_group(
        [dict(bundle) for _ in range(count)],
        strategy="PACK",
        bundle_label_selector=[{_NODE: own.id}, *({} for _ in range(count - 1))],
    )


def _in_order(group: Any, own: str) -> list[tuple[int, str]]:
    """Return the bundles with their nodes: those of ``own``, then the nodes with most bundles."""
    from ray.util import placement_group_table

    table: Any = placement_group_table(group)
    found: dict[int, str] = table["bundles_to_node_id"]
    counts = Counter(found.values())
    return sorted(found.items(), key=lambda each: (each[1] != own, -counts[each[1]], each[1]))


class _Placing:
    """Looks at the reserved devices, and says what each rank needs there."""

    def __init__(
        self,
        group: Any,
        bundles: Sequence[tuple[int, ClusterNode]],
        own: ClusterNode,
        device: str,
        user: Mapping[str, str],
    ) -> None:
        self._group = group
        self._bundles = bundles
        self._own = own
        self._device = device
        self._on_gpus = device != HOST
        self._user = user
        self._code = ""
        """URI of autofit's own code, once it is sent."""

    def place(self, script: Script, say: Say) -> Placed:
        """Return where the ranks of ``script`` run."""
        before = archive.identity(script.cwd)
        found = self._look(script.cwd)
        now = archive.identity(script.cwd)
        hosts = {node.id: (node, found[n]) for n, node in self._bundles if node.id != self._own.id}
        apart = {n for n, (_, f) in hosts.items() if not archive.is_seen(f.folder, before, now)}
        for node, each in hosts.values():
            self._check(node, each, say)
        copy = None
        if apart:
            in_copied_folder(script, script.cwd, script.cwd)  # raises UsageError if it is outside
            copy = archive.send_folder(script.cwd)
        here = [n for n, node in self._bundles if node.id == self._own.id]
        if not here:  # Ray 2.49 and older ignore the labels of bundles
            raise WorkerError(f"Ray has reserved no device on {self._own.host}: update Ray")
        say(f"{len(here)} of {len(self._bundles)} ranks on this host, {self._others(hosts)}")
        ranks = [
            self._remote(number, node, copy if node.id in apart else None)
            for number, node in self._bundles[len(here) :]
        ]
        cards = [card.entry for n in here if n in found for card in found[n].cards]
        free = [each.free for each in found.values()]
        if not self._on_gpus:
            free.append(meter.free_bytes(self._device))
        return Placed(
            hosts=Hosts(
                address=self._own.address,
                ranks=(*[None] * len(here), *ranks),
                free=min(free),
            ),
            environment=meter.kind(self._device).visible_only(cards) if cards else {},
        )

    def _look(self, folder: str) -> dict[int, Found]:
        """Start a worker in each bundle, and return what it finds; on this host only GPUs count."""
        import ray

        actors = {
            number: self._start(number, node)
            for number, node in self._bundles
            if self._on_gpus or node.id != self._own.id
        }
        answers = {number: actor.look.remote(folder) for number, actor in actors.items()}
        try:
            return {number: self._answer(number, each) for number, each in answers.items()}
        finally:
            for actor in actors.values():
                ray.kill(actor)

    def _answer(self, number: int, answer: Any) -> Found:
        import ray

        try:
            found: Found = ray.get(answer, timeout=LOOK)
        except ray.exceptions.RayError as error:
            host = dict(self._bundles)[number].host
            cause = getattr(error, "cause", None) or error
            raise WorkerError(f"{host} cannot be used: {first_line(cause)}") from error
        return found

    def _start(self, number: int, node: ClusterNode) -> Any:
        import ray

        here = node.id == self._own.id
        setting = ActorSetting(device=self._device, environment=self._user, here=here)
        carried = {} if node.here else {"py_modules": [self._sent_code()]}
        remote: Any = ray.remote  # its stubs know no such options
        options = in_bundle(self._group, number, self._device)
        return remote(runtime_env=carried, **options)(Slot).remote(setting)

    def _sent_code(self) -> str:
        self._code = self._code or archive.send_code()
        return self._code

    def _check(self, node: ClusterNode, found: Found, say: Say) -> None:
        own = of_node()
        if reasons := obstacles(found.versions, own, builds=self._on_gpus):
            raise UsageError(f"{node.host} cannot run this training: {', '.join(reasons)}")
        for remark in remarks(found.versions, own):
            say(f"{node.host}: {remark}")

    def _others(self, hosts: Mapping[str, tuple[ClusterNode, Found]]) -> str:
        counts = Counter(node.id for _, node in self._bundles)
        others = [f"{counts[n]} on {node.host}" for n, (node, _) in hosts.items()]
        return ", ".join(others) or "none elsewhere"

    def _remote(self, number: int, node: ClusterNode, folder: str | None) -> RemoteHost:
        return RemoteHost(
            name=node.host,
            node=node.id,
            group=self._group,
            bundle=number,
            user=self._user,
            code=None if node.here else self._sent_code(),
            folder=folder,
        )
