"""Lists the machines of a Ray cluster, and chooses which of them a search uses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autofit.exceptions import UsageError, WorkerError
from autofit.facts import HOST
from autofit.worker.cluster import archive
from autofit.worker.meter import ON_RAY, Load, loads

MODEL = "accelerator_type:"
"""Prefix of the resource by which Ray names a node's GPU model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A machine on which Ray runs."""

    id: str
    """Ray's identifier; a machine that joins again gets a new one."""
    host: str
    address: str
    cpus: int
    """CPUs that Ray may assign; a head node often has none."""
    gpus: int
    model: str
    """Ray's name of the GPUs, such as ``"H100"``; empty if Ray does not know it."""
    here: bool
    """Whether this process runs on it."""
    loads: tuple[Load, ...] = ()
    """Of its GPUs, as ``Loads`` has read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where trials may run."""

    device: str
    """The kind of device."""
    model: str
    """Ray's name of the GPUs."""
    slots: Mapping[str, int]
    """Number of concurrent trials on each node, by its id."""
    lines: tuple[str, ...] = ()
    """Lines for people: which part of a mixed cluster is used, and why."""


def look() -> dict[str, ClusterNode]:
    """Return the nodes that are alive, by id; this process must have joined their Ray.

    Raises ``WorkerError`` if Ray has ended on this process's own machine.
    """
    import ray

    found: Any = ray.nodes  # it has no types
    alive = [each for each in found() if each["Alive"]]
    own = ray.get_runtime_context().get_node_id()
    mine = next((_machine(each) for each in alive if each["NodeID"] == own), None)
    if mine is None:
        raise WorkerError(
            "Ray and its workers have ended on the machine where the search was started:"
            " start Ray there again. Finished trials are stored: run the same command to go on"
        )
    return {each["NodeID"]: _node(each, _machine(each) == mine) for each in alive}


def _machine(found: Mapping[str, Any]) -> tuple[str, str]:
    return found["NodeManagerHostname"], found["NodeManagerAddress"]


def _node(found: Mapping[str, Any], here: bool) -> ClusterNode:
    resources: Mapping[str, float] = found["Resources"]
    models = [name for name in resources if name.startswith(MODEL)]
    return ClusterNode(
        id=found["NodeID"],
        host=found["NodeManagerHostname"],
        address=found["NodeManagerAddress"],
        cpus=int(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
        model=models[0].removeprefix(MODEL) if models else "",
        here=here,
    )


class Loads:
    """Reads how much the GPUs of a cluster are used, with an actor on each machine that has some.

    An actor needs no device, and ends with this process.
    """

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        """By node; ``None`` on one where it could not run."""
        self._calls: dict[str, Any] = {}
        """The calls that have not been answered, by node."""

    def read(self, nodes: Iterable[ClusterNode]) -> list[ClusterNode]:
        """Return the nodes with the loads of those that answer within a second."""
        import ray

        found = {each.id: each for each in nodes}
        kept = {node: actor for node, actor in self._actors.items() if node in found}
        new = {node: _reader(found[node]) for node in found.keys() - kept if found[node].gpus}
        self._actors = kept | new
        able = {node: actor for node, actor in self._actors.items() if actor is not None}
        calls = {node: self._calls.get(node) or each.read.remote() for node, each in able.items()}
        asked = [*calls.values()]
        answered = ray.wait(asked, num_returns=len(asked), timeout=1.0)[0] if asked else []
        for node in [node for node, call in calls.items() if call in answered]:
            try:
                found[node] = replace(found[node], loads=ray.get(calls.pop(node)))
            except ray.exceptions.RayError:
                self._actors[node] = None
        self._calls = calls
        return [*found.values()]


class _Reader:
    """The actor of ``Loads``."""

    def read(self) -> tuple[Load, ...]:
        """Return the loads of this machine's GPUs."""
        return loads()


def _reader(node: ClusterNode) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote
    place = NodeAffinitySchedulingStrategy(node.id, soft=False)
    code = {} if node.here else {"py_modules": [archive.send_code()]}
    return remote(num_cpus=0, scheduling_strategy=place, runtime_env=code)(_Reader).remote()


def choose(nodes: Collection[ClusterNode], gpus: int | None, each: int) -> Places:
    """Return where trials of ``each`` GPUs may run: on GPUs of one model, ``gpus`` at most.

    Without GPUs in the cluster, each node runs one trial, because concurrent trials would slow one
    another down. Raises ``UsageError`` if the cluster has too few GPUs.
    """
    if not any(node.gpus for node in nodes):
        return _on_cpus(nodes, gpus)
    models = {node.model for node in nodes if node.gpus}
    capacities = {model: _capacities(nodes, model, each) for model in models}
    model = max(sorted(capacities), key=lambda model: sum(capacities[model].values()))
    have = sum(node.gpus for node in nodes if node.model == model)
    if not sum(capacities[model].values()):
        most = max(node.gpus for node in nodes)
        raise UsageError(
            f"--gpus-per-trial {each}: a trial runs on one host, and none of the cluster's has"
            f" more than {most} GPUs; ask for {most} at most"
        )
    if gpus is not None and gpus > have:
        raise UsageError(f"--gpus {gpus}: the cluster has {_cards(have, model)}; ask for fewer")
    slots = spread(capacities[model], None if gpus is None else gpus // each)
    lines = [_mixed(nodes, model, have)] if len(capacities) > 1 else []
    if gpus is not None and sum(slots.values()) < gpus // each:
        lines.append(
            f"--gpus {gpus} --gpus-per-trial {each}: a trial runs on one host;"
            f" the hosts can run {sum(slots.values())} at a time"
        )
    return Places(device=ON_RAY, model=model, slots=slots, lines=tuple(lines))


def more(
    places: Places, new: Collection[ClusterNode], each: int, left: int | None
) -> dict[str, int]:
    """Return how many trials each node that has joined can run, by id.

    ``places``: the nodes in use; ``left``: how many trials may be added, ``None`` for any number.
    """
    if places.device == HOST:
        return {node.id: 1 for node in new if node.cpus}
    return spread(_capacities(new, places.model, each), left)


def spread(capacities: Mapping[str, int], most: int | None) -> dict[str, int]:
    """Return the trials for each node, by id: ``most`` in all, on the largest nodes first.

    ``None`` fills all nodes.
    """
    left = sum(capacities.values()) if most is None else most
    chosen: dict[str, int] = {}
    for node in sorted(capacities, key=lambda node: -capacities[node]):
        chosen[node] = min(capacities[node], left)
        left -= chosen[node]
    return {node: count for node, count in chosen.items() if count > 0}


def _on_cpus(nodes: Iterable[ClusterNode], gpus: int | None) -> Places:
    slots = {node.id: 1 for node in nodes if node.cpus}
    if not slots:
        raise UsageError("Ray has no CPU on any node of the cluster: start a node with --num-cpus")
    if gpus is not None:
        raise UsageError(f"--gpus {gpus}: the cluster has no GPU; leave it out to use its CPUs")
    return Places(device=HOST, model="", slots=slots, lines=())


def _capacities(nodes: Iterable[ClusterNode], model: str, each: int) -> dict[str, int]:
    return {node.id: node.gpus // each for node in nodes if node.gpus and node.model == model}


def _mixed(nodes: Collection[ClusterNode], model: str, have: int) -> str:
    others: dict[str, list[ClusterNode]] = {}
    for node in nodes:
        if node.gpus and node.model != model:
            others.setdefault(node.model, []).append(node)
    left_out = ", ".join(
        f"{_cards(sum(node.gpus for node in found), name)}"
        f" on {', '.join(sorted(node.host for node in found))}"
        for name, found in sorted(others.items())
    )
    return f"{_cards(have, model)} are used, the most of one model; {left_out} are left out"


def _cards(count: int, model: str) -> str:
    return f"{count} x {model or 'a GPU that Ray cannot name'}"
