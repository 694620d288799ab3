"""Walks autograd graphs, and computes a digest of their shape.

The shape says which operations a call consists of, without their numbers. A term that a script
switches on (by a flag, a counter or a global) adds nodes to the graph. Other values in the same
operations do not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.graph import Node

ATTENTION = re.compile(r"^ScaledDotProduct\w*Attention\w*Backward")
"""torch chooses an attention kernel by size and mask; all kernels compute the same function."""
Edge = tuple[Node, int]
"""A node of the graph and the number of one of its outputs."""


def nodes_made() -> int:
    """Return how many nodes autograd has made in this thread; it counts them itself."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def edges_of(tensors: Iterable[Any]) -> list[Edge]:
    """Return the graph edges of those ``tensors`` that have a ``grad_fn``."""
    found = (t for t in tensors if isinstance(t, torch.Tensor))
    return [(t.grad_fn, t.output_nr) for t in found if t.grad_fn is not None]


def next_edges(node: Node) -> list[Edge]:
    """Return the edges from ``node`` to the nodes that its backward sends gradients to."""
    return [
        (following, number) for following, number in node.next_functions if following is not None
    ]


def walk(
    edges: Iterable[Edge], seen: set[Node], enter: Callable[[Edge], bool] = lambda edge: True
) -> Iterator[Edge]:
    """Yield ``edges`` and all edges behind them; go on from each node once.

    ``seen`` has the nodes that were entered before, and gets those that are entered now. The walk
    does not go on from an edge for which ``enter`` returns ``False``.
    """
    waiting = list(edges)
    while waiting:
        edge = waiting.pop()
        yield edge
        node = edge[0]
        if node not in seen and enter(edge):
            seen.add(node)
            waiting += next_edges(node)


def nodes(tensors: Iterable[Any]) -> Iterator[Node]:
    """Yield each node of the graph behind ``tensors`` once."""
    seen: set[Node] = set()
    for node, _ in walk(edges_of(tensors), set()):
        if node not in seen:
            seen.add(node)
            yield node


def variable_of(node: Node) -> torch.Tensor | None:
    """Return the tensor whose ``.grad`` the node accumulates; ``None`` for any other node."""
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, torch.Tensor) else None


def differentiated(tensors: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a backward from ``tensors`` brings gradients to."""
    return (variable for node in nodes(tensors) if (variable := variable_of(node)) is not None)


class Shapes:
    """Computes the shapes of the graphs of one root's calls."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        """The digests of the shapes seen, by their hash in this process."""

    def of(self, outputs: Iterable[Any], parameters: Iterable[torch.Tensor]) -> str:
        """Return 16 hexadecimal digits that are the same for equal shapes, in all processes.

        Two shapes are equal if the same operations follow one another and end at the same
        ``parameters``. The graphs are read breadth first from ``outputs``.
        """
        positions = {id(each): index for index, each in enumerate(parameters)}
        described = _described(outputs, positions)
        key = hash(tuple(described))
        if key not in self._names:
            text = " ".join(each if isinstance(each, str) else _name(each) for each in described)
            self._names[key] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._names[key]


def _name(each: Any) -> str:
    return ATTENTION.sub("Attention", each.__name__) if isinstance(each, type) else str(each)


def _described(outputs: Iterable[Any], positions: Mapping[int, int]) -> list[Any]:
    """Return the types of a graph's nodes and the numbers of their edges, breadth first."""
    numbers: dict[Node, int] = {}
    found_nodes: list[Node] = []
    found: list[Any] = []
    for output in outputs:
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        if node is None:
            found.append("-")
            continue
        if node not in numbers:
            numbers[node] = len(found_nodes)
            found_nodes.append(node)
        found += (numbers[node], output.output_nr)
    for node in found_nodes:  # it grows in the loop
        following = node.next_functions
        found.append(type(node))
        if not following and (variable := variable_of(node)) is not None:
            found.append(positions.get(id(variable), -1))
        for each, which in following:
            if each is None:
                found.append("-")
                continue
            known = numbers.get(each)
            if known is None:
                known = numbers[each] = len(found_nodes)
                found_nodes.append(each)
            found.append(known)
            if which:
                found.append(f".{which}")
    return found
