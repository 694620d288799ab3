"""The machines of a Ray cluster, as Ray knows them, and which of them a search uses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autofit.exceptions import UsageError, WorkerError

_MODEL = "accelerator_type:"
"""Ray names a node's GPU model by a resource that begins so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine that Ray runs on."""

    id: str
    """Ray's; a machine that comes back has another."""
    host: str
    address: str
    cpus: int
    """That Ray may give away; those of a head node are often none."""
    gpus: int
    model: str
    """Of the GPUs, as Ray calls it (``"H100"``); empty where it does not know."""
    here: bool
    """It is the machine this process runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where trials may run."""

    device: str
    """``"cpu"`` or ``"cuda"``."""
    model: str
    """Of the GPUs, as Ray calls it."""
    slots: Mapping[str, int]
    """Trials side by side on each node, by its id."""
    lines: tuple[str, ...] = ()
    """For people: what is used of a mixed cluster, and why."""


def look() -> dict[str, Node]:
    """Return the nodes that are alive, by id; this process must have joined their Ray.

    Raises ``WorkerError`` where this process has lost its own.
    """
    import ray

    found: Any = ray.nodes  # it has no types
    alive = [each for each in found() if each["Alive"]]
    own = ray.get_runtime_context().get_node_id()
    mine = next((_machine(each) for each in alive if each["NodeID"] == own), None)
    if mine is None:
        raise WorkerError(
            "Ray has ended on the machine where the search was started, and took its workers along:"
            " start it there again. Finished trials are stored: the same command carries on"
        )
    return {each["NodeID"]: _node(each, _machine(each) == mine) for each in alive}


def _machine(found: Mapping[str, Any]) -> tuple[str, str]:
    return found["NodeManagerHostname"], found["NodeManagerAddress"]


def _node(found: Mapping[str, Any], here: bool) -> Node:
    resources: Mapping[str, float] = found["Resources"]
    models = [name for name in resources if name.startswith(_MODEL)]
    return Node(
        id=found["NodeID"],
        host=found["NodeManagerHostname"],
        address=found["NodeManagerAddress"],
        cpus=int(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
        model=models[0].removeprefix(_MODEL) if models else "",
        here=here,
    )


def choose(nodes: Collection[Node], gpus: int | None, each: int) -> Places:
    """Return where trials of ``each`` GPUs may run: all of one model, ``gpus`` at most.

    Without GPUs in the cluster: one trial a node, because trials side by side would disturb one
    another's times. Raises ``UsageError`` where the cluster has no room for what was asked.
    """
    if not any(node.gpus for node in nodes):
        return _on_cpus(nodes, gpus)
    rooms = {model: _rooms(nodes, model, each) for model in {n.model for n in nodes if n.gpus}}
    model = max(sorted(rooms), key=lambda model: sum(rooms[model].values()))
    have = sum(node.gpus for node in nodes if node.model == model)
    if not sum(rooms[model].values()):
        most = max(node.gpus for node in nodes)
        raise UsageError(
            f"--gpus-per-trial {each}: a trial runs on one host, and none of the cluster's has"
            f" more than {most} GPUs; ask for {most} at most"
        )
    if gpus is not None and gpus > have:
        raise UsageError(f"--gpus {gpus}: the cluster has {_cards(have, model)}; ask for fewer")
    slots = spread(rooms[model], None if gpus is None else gpus // each)
    lines = [_mixed(nodes, model, have)] if len(rooms) > 1 else []
    if gpus is not None and sum(slots.values()) < gpus // each:
        lines.append(
            f"--gpus {gpus} --gpus-per-trial {each}: a trial runs on one host;"
            f" there is room for {sum(slots.values())} side by side"
        )
    return Places(device="cuda", model=model, slots=slots, lines=tuple(lines))


def more(places: Places, new: Collection[Node], each: int, left: int | None) -> dict[str, int]:
    """Return how many trials nodes that have joined have room for, by id.

    ``places``: what is used already; ``left``: trials that may be added, any number if ``None``.
    """
    if places.device == "cpu":
        return {node.id: 1 for node in new if node.cpus}
    return spread(_rooms(new, places.model, each), left)


def spread(rooms: Mapping[str, int], most: int | None) -> dict[str, int]:
    """Return ``most`` of the ``rooms``, from the nodes that have most; all of them if ``None``."""
    left = sum(rooms.values()) if most is None else most
    taken: dict[str, int] = {}
    for node in sorted(rooms, key=lambda node: -rooms[node]):
        taken[node] = min(rooms[node], left)
        left -= taken[node]
    return {node: count for node, count in taken.items() if count > 0}


def _on_cpus(nodes: Iterable[Node], gpus: int | None) -> Places:
    slots = {node.id: 1 for node in nodes if node.cpus}
    if not slots:
        raise UsageError("no node of the cluster has a CPU for Ray to give: start one with some")
    lines = () if gpus is None else (f"--gpus {gpus}: the cluster has no GPU, CPUs are used",)
    return Places(device="cpu", model="", slots=slots, lines=lines)


def _rooms(nodes: Iterable[Node], model: str, each: int) -> dict[str, int]:
    return {node.id: node.gpus // each for node in nodes if node.gpus and node.model == model}


def _mixed(nodes: Collection[Node], model: str, have: int) -> str:
    others: dict[str, list[Node]] = {}
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
