"""Finds tensors that grow in number with every step, and the line of the script that keeps them."""

from __future__ import annotations

import ast
import gc
import linecache
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

import torch

from autofit.worker.harness.measurement.allocations import Allocation, AllocationLog
from autofit.worker.harness.torch_state import frames
from autofit.worker.records.inspection import Growth
from autofit.worker.records.places import Place

FEWEST = 3
"""Steps in a row, each of which must have left tensors, the last step excepted."""
ADDING = frozenset(
    {"append", "appendleft", "extend", "add", "insert", "update", "setdefault", "push"}
)
"""Methods that add to a container."""
LOOKED_AT = 10
"""Most tensors of a leak whose holder is looked for."""
MOST = 20
"""Most leaks that are reported."""


def growths(log: AllocationLog, first: int) -> tuple[Growth, ...]:
    """Return the leaks of the followed steps, the largest first.

    Tensors of the last step may be in use, and variables keep one more step. So a leak is what each
    step before the last two has left.

    ``first``: the first followed step, as ``Allocation.step`` counts.
    """
    last = log.step - 2
    steps = range(first, last)
    if len(steps) < FEWEST:
        return ()
    gc.collect()
    groups: dict[tuple[object, ...], list[Allocation]] = defaultdict(list)
    for each in log.existing():
        if each.step in steps and not each.role:
            groups[each.lines.users, each.operation, each.module].append(each)
    found = [group for group in groups.values() if {each.step for each in group} == set(steps)]
    if not found:
        return ()
    holders = _Holders(log, {each.key for group in found for each in group})
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

    def __init__(self, log: AllocationLog, leaked: set[int]) -> None:
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

    def of(self, group: Sequence[Allocation]) -> tuple[str, Place | None]:
        """Return what keeps the tensors, and the line that puts them there."""
        direct = [tensor for each in group for tensor in self._direct.get(each.key, ())]
        ours = {id(direct), id(self._graphs), *map(id, self._direct.values())}
        for candidates, through in ((direct, ""), (self._graphs, " through the graph")):
            for tensor in candidates[:LOOKED_AT]:
                found = self._names.container_of(tensor, ours)
                if found is not None:
                    name, kind, place = found
                    return f"the {kind} {name}{through}", place
        return "", None


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

    def container_of(
        self, tensor: torch.Tensor, ours: set[int]
    ) -> tuple[str, str, Place | None] | None:
        """Return name and type of the container with ``tensor``, and the line that fills it.

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
                    return name, type(holder).__name__, self._filled_at(name)
                if depth < 3:
                    todo.append((holder, depth + 1))
        return None

    def _name_of(self, holder: object) -> str | None:
        """Return the script's name of a container: a variable, or an attribute."""
        for frame in self._frames:
            for space in (frame.f_locals, frame.f_globals):
                for name, value in list(space.items()):
                    if value is holder and not name.startswith("__"):
                        return name
        for owner in gc.get_referrers(holder):
            if not isinstance(owner, dict):
                continue
            key = next((k for k, v in list(owner.items()) if v is holder), None)
            of_object = [
                each
                for each in gc.get_referrers(owner)
                if getattr(each, "__dict__", None) is owner and not isinstance(each, ModuleType)
            ]
            if isinstance(key, str) and of_object:
                return f"self.{key}"
        return None

    def _filled_at(self, name: str) -> Place | None:
        """Return the first line of the script that adds to a container called ``name``."""
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
    """Return whether a statement adds to the container called ``name``."""
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr=method)) if method in ADDING:
            return _is_named(owner, name)
        case ast.AugAssign(target=target):
            return _is_named(target, name)
        case ast.Assign(targets=[ast.Subscript(value=owner)]):
            return _is_named(owner, name)
    return False


def _is_named(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Name(id=found) | ast.Attribute(attr=found):
            return found == name
        case ast.Subscript(value=inner):
            return _is_named(inner, name)
    return False


def _users_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frames.is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back
