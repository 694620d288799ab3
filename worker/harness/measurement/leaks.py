"""Finds tensors and graphs that grow in number with every step, and the line that keeps them."""

from __future__ import annotations

import ast
import gc
import linecache
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.autograd.graph import Node

from autofit.worker.harness.measurement.allocations import Allocation, AllocationLog
from autofit.worker.harness.torch_state import frames
from autofit.worker.harness.torch_state.graph import edges_of, walk
from autofit.worker.harness.torch_state.pytree import flatten
from autofit.worker.records.inspection import Growth, SourceLine

FEWEST = 2
"""Steps in a row, each of which must have left tensors or a graph. A trial has no more of them."""
ADDING = frozenset(
    {"append", "appendleft", "extend", "add", "insert", "update", "setdefault", "push"}
)
"""Methods that add to a container."""
LOOKED_AT = 10
"""Most tensors of a leak whose holder is looked for."""
MOST = 20
"""Most leaks that are reported."""


NODES = "nodes of the graph"
"""What grows if a graph is kept whose tensors a backward pass has freed."""
_STEP = "autofit step"
"""Key in a node's own dictionary for the mark of its step."""


def _steps_to_free(first: int, now: int) -> range:
    """Return the steps, from ``first`` on, of which nothing should be left after ``now`` steps.

    Tensors of the last step may be in use, and variables keep one more step. The range is empty if
    it were too short to show growth.
    """
    steps = range(first, now - 2)
    return steps if len(steps) >= FEWEST else range(0)


class _Mark:
    """Lives as long as the graph of a call."""

    __slots__ = ("__weakref__", "step")

    def __init__(self, step: int) -> None:
        self.step = step


class Graphs:
    """Notices the graphs of earlier steps that still exist: a mark in a node ends with the node."""

    def __init__(self) -> None:
        self.held: list[int] = []
        """Bytes that tensors hold on the device after each step, as far as that was noted."""
        self._marks: dict[int, list[weakref.ref[_Mark]]] = defaultdict(list)

    def note(self, output: Any, step: int) -> None:
        """Mark the graph of a call in ``step``; ``output``: what the model has returned."""
        for node, _ in edges_of(flatten(output)[0]):
            metadata = _metadata(node)
            if _STEP not in metadata:  # a model may return one tensor in each step
                mark = metadata[_STEP] = _Mark(step)
                self._marks[step].append(weakref.ref(mark))

    def growth(self, first: int, now: int) -> Growth | None:
        """Return the growth if a graph of each step since ``first`` is left after ``now`` steps.

        Its size is that on the device; the nodes are in host memory.
        """
        steps = _steps_to_free(first, now)
        if not steps or not self._left(steps):
            return None
        gc.collect()  # a cycle of references lives until it is collected
        if not self._left(steps):
            return None
        holder, held_at = self.holder(steps)
        # The first step may differ: a script validates, say, after each step.
        grown = min((after - before for before, after in pairwise(self.held)), default=0)
        return Growth(
            size=max(0, grown),
            count=0,
            made=None,
            operation=NODES,
            holder=holder,
            held_at=held_at,
        )

    def _left(self, steps: range) -> bool:
        return all(any(mark() is not None for mark in self._marks[step]) for step in steps)

    def holder(self, steps: range) -> tuple[str, SourceLine | None]:
        """Return the variable that keeps a graph of ``steps``, and the line that fills it."""
        found, names = self._keeping(steps), _Names()
        for find in (names.container_of, names.variable_of):
            for tensor in found:
                if (named := find(tensor, {id(found)})) is not None:
                    return named
        return "", None

    def _keeping(self, steps: range) -> list[torch.Tensor]:
        """Return tensors whose graphs lead to one of ``steps``."""
        found: list[torch.Tensor] = []
        others: set[Node] = set()
        """Nodes from which no marked node can be reached."""
        for tensor in _tensors():
            if _leads_to(steps, tensor, others):
                found.append(tensor)
            if len(found) == LOOKED_AT:
                break
        return found


def _leads_to(steps: range, tensor: torch.Tensor, others: set[Node]) -> bool:
    """Return whether a graph leads to one of ``steps``; if not, add its nodes to ``others``."""
    seen: set[Node] = set()
    for node, _ in walk(edges_of([tensor]), seen, lambda edge: edge[0] not in others):
        mark = _metadata(node).get(_STEP)
        if mark is not None and mark.step in steps:
            return True
    others |= seen
    return False


def _metadata(node: Node) -> dict[str, Any]:
    found: Any = node.metadata  # a property, though torch declares a method
    return found  # type: ignore[no-any-return]


def growths(log: AllocationLog, first: int, graphs: Graphs) -> tuple[Growth, ...]:
    """Return the leaks of the followed steps, the largest first.

    A leak is what each of the steps has left. Graphs are reported only if no tensors are left.

    ``first``: the first followed step, as ``Allocation.step`` counts.
    """
    steps = _steps_to_free(first, log.step)
    if not steps:
        return ()
    gc.collect()
    groups: dict[tuple[object, ...], list[Allocation]] = defaultdict(list)
    for each in log.existing():
        if each.step in steps and not each.role:
            groups[each.lines.users, each.operation, each.module].append(each)
    found = [group for group in groups.values() if {each.step for each in group} == set(steps)]
    if not found:
        nodes = graphs.growth(first, log.step)
        return () if nodes is None else (nodes,)
    holders = _Holders(log, {each.key for group in found for each in group}, graphs.holder(steps))
    grown = [_growth(group, len(steps), holders) for group in found]
    return tuple(sorted(grown, key=lambda each: -each.size)[:MOST])


def _growth(group: Sequence[Allocation], steps: int, holders: _Holders) -> Growth:
    largest = max(group, key=lambda each: each.size)
    made = largest.lines.users
    holder, held_at = holders.of(group)
    return Growth(
        size=sum(each.size for each in group) // steps,
        count=max(1, len(group) // steps),
        made=None if made is None else frames.place_at(*made),
        operation=largest.operation,
        module=largest.module,
        holder=holder,
        held_at=held_at,
    )


class _Holders:
    """Finds what keeps leaked tensors: a container that the script fills, or a graph."""

    def __init__(
        self, log: AllocationLog, leaked: set[int], of_graphs: tuple[str, SourceLine | None]
    ) -> None:
        """``of_graphs``: what keeps the graphs of the steps, as ``Graphs.holder`` returns it."""
        self._of_graphs = of_graphs
        self._direct: dict[int, list[torch.Tensor]] = defaultdict(list)
        """Leaked tensors with a Python object, by the address of their storage."""
        self._graphs: list[torch.Tensor] = []
        """Tensors of the followed steps that keep a graph."""
        followed = {each.key for each in log.existing() if not each.role}
        for each in _tensors():
            key = each.untyped_storage()._cdata
            if key in leaked:
                self._direct[key].append(each)
            if each.grad_fn is not None and key in followed:
                self._graphs.append(each)
        self._names = _Names()

    def of(self, group: Sequence[Allocation]) -> tuple[str, SourceLine | None]:
        """Return what keeps the tensors, and the line that puts them there."""
        direct = [tensor for each in group for tensor in self._direct.get(each.key, ())]
        ours = {id(direct), id(self._graphs), *map(id, self._direct.values())}
        for candidates, through in ((direct, ""), (self._graphs, " through the graph")):
            for tensor in candidates[:LOOKED_AT]:
                if (found := self._names.container_of(tensor, ours)) is not None:
                    holder, place = found
                    return f"{holder}{through}", place
        holder, place = self._of_graphs
        return f"{holder} through the graph" if holder else "", place


def _tensors() -> Iterator[torch.Tensor]:
    for each in gc.get_objects():
        # ``isinstance`` would read ``__class__``, which lazy objects of libraries answer.
        if issubclass(type(each), torch.Tensor) and each.layout is torch.strided:
            try:
                each.untyped_storage()
            except (RuntimeError, NotImplementedError):
                continue
            yield each


class _Names:
    """Finds the script's names of containers, and the lines that fill them."""

    def __init__(self) -> None:
        self._frames = list(_users_frames())

    def variable_of(
        self, tensor: torch.Tensor, ours: set[int]
    ) -> tuple[str, SourceLine | None] | None:
        """Return the variable with ``tensor``, and the line that adds to it."""
        name = self._name_of(tensor)
        return None if name is None else (f"the variable {name}", self._filled_at(name))

    def container_of(
        self, tensor: torch.Tensor, ours: set[int]
    ) -> tuple[str, SourceLine | None] | None:
        """Return the container with ``tensor``, and the line that fills it.

        ``ours``: identities of containers that do not belong to the script.
        """
        todo: deque[tuple[Any, int]] = deque([(tensor, 0)])
        seen = {id(todo), id(self._frames), *ours}
        while todo:
            thing, depth = todo.popleft()
            for holder in gc.get_referrers(thing):
                if id(holder) in seen or not isinstance(holder, (list, dict, set, tuple, deque)):
                    continue
                seen.add(id(holder))
                if isinstance(holder, dict) and "__builtins__" in holder:  # a module's variables
                    continue
                name = self._name_of(holder)
                if name is not None:
                    return f"the {type(holder).__name__} {name}", self._filled_at(name)
                if depth < 3:
                    todo.append((holder, depth + 1))
        return None

    def _name_of(self, holder: object) -> str | None:
        """Return the script's name of an object: a variable, or an attribute."""
        for frame in self._frames:
            for space in (frame.f_locals, frame.f_globals):
                for name, value in list(space.items()):
                    if value is holder and not name.startswith("__"):
                        return name
        for owner in gc.get_referrers(holder):
            # Until somebody asks for its ``__dict__``, an object holds its attributes itself.
            objects = gc.get_referrers(owner) if isinstance(owner, dict) else [owner]
            for each in objects:
                attributes = None if _is_ours(each) else getattr(each, "__dict__", None)
                if not isinstance(attributes, dict) or isinstance(each, ModuleType):
                    continue
                key = next((k for k, v in list(attributes.items()) if v is holder), None)
                if isinstance(key, str):
                    return f"self.{key}"
        return None

    def _filled_at(self, name: str) -> SourceLine | None:
        """Return the first line of the script that adds to what is called ``name``."""
        for file in self._files():
            source = "".join(linecache.getlines(file))
            try:
                tree = ast.parse(source)
            except SyntaxError:
                continue
            for node in ast.walk(tree):
                if _fills(node, name.removeprefix("self.")):
                    return frames.place_at(file, node.lineno)  # type: ignore[attr-defined]
        return None

    def _files(self) -> Iterable[str]:
        """Return the user's files: those on the stack, then the other imported ones."""
        running = [frame.f_code.co_filename for frame in self._frames]
        imported = [
            file
            for module in list(sys.modules.values())
            if isinstance(file := getattr(module, "__file__", None), str)
            and file.endswith(".py")
            and frames.is_users(file)
        ]
        return dict.fromkeys((*running, *imported))


def _fills(node: ast.AST, name: str) -> bool:
    """Return whether a statement adds to the container or the number called ``name``."""
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr=method)) if method in ADDING:
            return _is_named(owner, name)
        case ast.AugAssign(target=target):
            return _is_named(target, name)
        case ast.Assign(targets=[ast.Subscript(value=owner)]):
            return _is_named(owner, name)
        case ast.Assign(targets=[target], value=ast.BinOp(left=left, right=right)):
            adds = _is_named(left, name) or _is_named(right, name)
            return adds and _is_named(target, name)
    return False


def _is_named(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Name(id=found) | ast.Attribute(attr=found):
            return found == name
        case ast.Subscript(value=inner):
            return _is_named(inner, name)
    return False


def _is_ours(thing: object) -> bool:
    return type(thing).__module__.startswith("autofit.")


def _users_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frames.is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back
