"""The shape of an autograd graph: which operations a call was made of, whatever its numbers are.

A term that a script switches on, through whatever it may be (a flag, a counter, a global), adds
nodes. A number that varies while the shape stays the same does not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.autograd.graph import Node

ATTENTION = re.compile(r"^ScaledDotProduct\w*Attention\w*Backward")
"""torch chooses a kernel of attention by size and mask: all of them compute the same."""


class Shapes:
    """Tells the shapes of the graphs of one root's calls."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        """The names of the shapes seen, by what tells them apart in this process."""

    def of(self, outputs: Iterable[Any], parameters: Iterable[torch.Tensor]) -> str:
        """Return 16 hexadecimal digits, the same in all processes for graphs of one shape.

        Graphs are walked breadth first from ``outputs``, those of them that have one. Two shapes
        are equal when the same operations follow one another and end at the same ``parameters``.
        """
        positions = {id(each): index for index, each in enumerate(parameters)}
        walked = _walked(outputs, positions)
        key = hash(tuple(walked))
        if key not in self._names:
            text = " ".join(each if isinstance(each, str) else _name(each) for each in walked)
            self._names[key] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._names[key]


def _name(each: Any) -> str:
    return ATTENTION.sub("Attention", each.__name__) if isinstance(each, type) else str(each)


def _walked(outputs: Iterable[Any], positions: Mapping[int, int]) -> list[Any]:
    """Return what tells a graph from others: the types of its nodes, and the numbers of edges."""
    numbers: dict[Node, int] = {}
    todo: list[Node] = []
    found: list[Any] = []
    for output in outputs:
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        if node is None:
            found.append("-")
            continue
        if node not in numbers:
            numbers[node] = len(todo)
            todo.append(node)
        found += (numbers[node], output.output_nr)
    for node in todo:  # grows as it is walked
        following = node.next_functions
        found.append(type(node))
        if not following and (variable := getattr(node, "variable", None)) is not None:
            found.append(positions.get(id(variable), -1))
        for each, which in following:
            if each is None:
                found.append("-")
                continue
            known = numbers.get(each)
            if known is None:
                known = numbers[each] = len(todo)
                todo.append(each)
            found.append(known)
            if which:
                found.append(f".{which}")
    return found
