"""A snapshot of the state that a call of a model can reach and change.

A call reaches the buffers and attributes of all modules. In them it reaches lists, dictionaries,
sets, arrays, tensors, generators and plain objects. It also reaches the state of hooks, and the
globals, closure variables and class attributes that the user's own code names. The snapshot leaves
out weights. The walk has limits, and state beyond them is not restored.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from autofit.worker.harness.torch_state.frames import is_library
from autofit.worker.harness.torch_state.modules import HOOKS, hooks_of_script, is_sharded
from autofit.worker.harness.torch_state.state_kinds import (
    DICT,
    PLAIN,
    TENSOR,
    Kind,
    kind_of,
    value_of,
)
from autofit.worker.meter import accelerator

MOST = 200_000
"""The most objects in a snapshot."""
DEPTH = 8
"""The greatest depth below a module."""

_DICTS = tuple(name for name, held in vars(nn.Module()).items() if isinstance(held, dict))
"""The dictionaries that every module has, such as hooks, parameters and children."""
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
_CLOSED = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "autofit", "builtins"}
"""Packages whose objects are not entered, except those with a ``Kind``."""


class Absent(Enum):
    """The type of ``ABSENT``."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT
Key = tuple[str, str]
"""The name of a place, and ``"content"`` for an object's content."""


class Names(NamedTuple):
    """Reads and sets the names of one kind of namespace."""

    read: Callable[[Any], Mapping[str, Any]]
    write: Callable[[Any, str, Any], None]
    """Set a name in a namespace; ``ABSENT`` deletes it."""


def _in(mapping: Callable[[Any], dict[str, Any]]) -> Names:
    def write(thing: Any, name: str, value: Any) -> None:
        held = mapping(thing)
        if value is ABSENT:
            held.pop(name, None)
        else:
            held[name] = value

    return Names(mapping, write)


def _slots(thing: Any) -> dict[str, Any]:
    names = (name for cls in type(thing).__mro__ for name in _listed(vars(cls).get("__slots__")))
    return {name: getattr(thing, name) for name in names if hasattr(thing, name)}


def _listed(slots: Any) -> Iterable[str]:
    names = (slots,) if isinstance(slots, str) else tuple(slots or ())
    return (name for name in names if not name.startswith("__"))


def _set_attribute(thing: Any, name: str, value: Any) -> None:
    if value is not ABSENT:
        object.__setattr__(thing, name, value)
    elif hasattr(thing, name):
        object.__delattr__(thing, name)


def _class_attributes(cls: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith("__") and not name.startswith("_abc")
        if not hasattr(type(value), "__get__") and not isinstance(value, type)
    }


def _set_class_attribute(cls: type, name: str, value: Any) -> None:
    if value is not ABSENT:
        type.__setattr__(cls, name, value)
    elif name in vars(cls):
        type.__delattr__(cls, name)


def _cells(function: types.FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


def _set_cell(function: types.FunctionType, name: str, value: Any) -> None:
    assert function.__closure__ is not None
    cell = function.__closure__[function.__code__.co_freevars.index(name)]
    if value is ABSENT:
        del cell.cell_contents
    else:
        cell.cell_contents = value


VARS = _in(vars)
BUFFERS = _in(lambda module: module._buffers)
GLOBALS = _in(lambda function: function.__globals__)
SLOTS = Names(_slots, _set_attribute)
CLASS = Names(_class_attributes, _set_class_attribute)
CELLS = Names(_cells, _set_cell)
HELD_BY_FUNCTION = Names(
    lambda f: {"func": getattr(f, "func", None), "self": getattr(f, "__self__", None)},
    lambda *_: None,
)

FLAG = Kind(
    lambda parameter: parameter.requires_grad,
    lambda parameter, flag: parameter.requires_grad_(flag) is not None,
    lambda _, flag: flag,
)
"""Only ``requires_grad`` of a parameter is compared and restored."""


@dataclass(slots=True, eq=False)
class Node:
    """An object that was reached."""

    name: str
    thing: Any
    up: Node | None
    step: Callable[[Any], Any]
    """Returns the object, given the object above."""
    depth: int
    kind: Kind | Names
    content: Any = None
    only: tuple[str, ...] | None = None
    """The names of a namespace that are compared; ``None`` for all."""
    inside: str = ""
    """The prefix of the names of a namespace."""

    def names(self) -> dict[str, Any]:
        """Return the present values of the compared names."""
        assert isinstance(self.kind, Names)
        held = self.kind.read(self.thing)
        if self.only is not None:
            return {name: held[name] for name in self.only if name in held}
        return dict(held)


@dataclass(frozen=True, slots=True)
class Place:
    """A name in a namespace, or an object's content, found again at each use.

    It does not keep the model alive: it starts at the nearest object that has weak references.
    """

    name: str
    _anchor: weakref.ref[Any]
    _steps: tuple[Callable[[Any], Any], ...]
    _kind: Kind | Names
    _key: str = ""

    def read(self) -> Any:
        """Return the present value, for ``write``."""
        if (thing := self._thing()) is ABSENT:
            return ABSENT
        if isinstance(self._kind, Names):
            return thing, self._kind.read(thing).get(self._key, ABSENT)
        return thing, self._kind.read(thing)

    def write(self, value: Any) -> None:
        """Restore a value that ``read`` returned, in the object it was read from."""
        if value is ABSENT:
            return
        thing, content = value
        if isinstance(self._kind, Names):
            self._kind.write(thing, self._key, content)
        else:
            self._kind.write(thing, content)

    def tensor(self) -> torch.Tensor | None:
        """Return the tensor at this place."""
        thing = self._thing() if self._kind is TENSOR else None
        return thing if isinstance(thing, torch.Tensor) else None

    def _thing(self) -> Any:
        if (thing := self._anchor()) is None:
            return ABSENT
        try:
            for step in self._steps:
                thing = step(thing)
        except (LookupError, AttributeError):
            return ABSENT
        return thing


class Snapshot:
    """The state that calls of ``module`` can reach, at the time of construction."""

    def __init__(self, module: nn.Module, *, copies: bool = True) -> None:
        """``copies``: copy tensors and arrays, so that they can be restored."""
        self.module = module
        self.nodes = _Walk(module).nodes
        self.copies = copies
        self.values: dict[Key, Any] = {}
        """The value of each place."""
        self.node_of: dict[Key, Node] = {}
        for node in self.nodes:
            self._read(node)

    def _read(self, node: Node) -> None:
        if isinstance(node.kind, Names):
            for name, held in node.content.items():
                key = node.inside + name, ""
                self.values[key], self.node_of[key] = value_of(held), node
            return
        if self.copies and node.kind.copies:
            node.content = node.kind.read(node.thing)
        key = node.name, "content"
        self.values[key], self.node_of[key] = node.kind.value(node.thing, node.content), node

    def restore(self) -> list[str]:
        """Restore the state; return the names of the objects that cannot be restored."""
        assert self.copies, "a reading holds no copies"
        left = []
        for node in self.nodes:
            if isinstance(node.kind, Names):
                _put_names(node)
                continue
            try:
                done = node.kind.write(node.thing, node.content)
            except (RuntimeError, ValueError, TypeError):  # an object that cannot be written to
                done = False
            left += [] if done else [node.name]
        return left

    def places(self, changed: Iterable[Key], after: Snapshot) -> tuple[Place, ...]:
        """Return the places of ``changed``, and those on the way from a module's attribute."""
        found: dict[tuple[int, str], Place] = {}
        for key in changed:
            snapshot = self if key in self.node_of else after
            node, name = snapshot.node_of[key], key[0]
            if isinstance(node.kind, Names):
                own = name.removeprefix(node.inside)
                found[id(node.thing), own] = _place(name, node, own)
                continue
            while not isinstance(node.kind, Names):
                found[id(node.thing), ""] = _place(node.name, node)
                if node.up is None:
                    break
                node, child = node.up, node
                if isinstance(node.kind, Names) and (own := _own_name(node, child)):
                    found[id(node.thing), own] = _place(child.name, node, own)
        return tuple(found.values())


def key_of(place: Place) -> Key:
    """Return the key by which a place is found in a copy of its model or in another process."""
    return place.name, "" if isinstance(place._kind, Names) else "content"


def places_at(module: nn.Module, keys: Iterable[Key]) -> tuple[Place, ...]:
    """Return the places of a model at ``keys``, including names that do not exist yet."""
    now = Snapshot(module, copies=False)
    keys = [(name, what) for name, what in keys]
    found = {key_of(place): place for place in now.places(filter(now.node_of.get, keys), now)}
    for key in keys:
        if key not in found and (place := _absent(now, *key)) is not None:
            found[key] = place
    return tuple(found.values())


def _absent(now: Snapshot, name: str, what: str) -> Place | None:
    """Return the place of a missing name, in the namespace with the longest matching prefix."""
    spaces = [node for node in now.nodes if isinstance(node.kind, Names)]
    fitting = [
        n for n in spaces if name.startswith(n.inside) and name[len(n.inside) :].isidentifier()
    ]
    node = max(fitting, key=lambda each: len(each.inside), default=None)
    return None if what or node is None else _place(name, node, name[len(node.inside) :])


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors, without weights, that calls of ``module`` can reach."""
    return (node.thing for node in _Walk(module).nodes if node.kind is TENSOR)


def changes(before: Snapshot, after: Snapshot) -> list[Key]:
    """Return the places with different values."""
    return [
        key
        for key in dict.fromkeys((*before.values, *after.values))
        if not equal(before.values.get(key, ABSENT), after.values.get(key, ABSENT))
    ]


def equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal; NaN equals NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and bool(torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if type(one) is not type(other):
        return False
    return bool(one == other) or (one != one and other != other)


def _put_names(node: Node) -> None:
    assert isinstance(node.kind, Names)
    now = node.names()
    for name in now.keys() - node.content.keys():
        node.kind.write(node.thing, name, ABSENT)
    for name, held in node.content.items():
        if now.get(name, ABSENT) is not held:
            node.kind.write(node.thing, name, held)


def _place(name: str, node: Node, key: str = "") -> Place:
    """Return the place of a node, or of a name in it, relative to an object that persists."""
    steps: list[Callable[[Any], Any]] = []
    at = node
    while at.up is not None and not isinstance(at.thing, _LASTING):
        steps.insert(0, at.step)
        at = at.up
    return Place(name, weakref.ref(at.thing), tuple(steps), node.kind, key)


_LASTING = (nn.Module, types.FunctionType, types.ModuleType, type)


def _own_name(node: Node, child: Node) -> str:
    held = (node.content or {}).items()
    return next((name for name, each in held if each is child.thing), "")


# --- the walk ---------------------------------------------------------------------------------


@dataclass
class _Walk:
    """Finds reachable objects, breadth first."""

    module: nn.Module
    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seen: set[int] = _excluded()
        self._codes: set[types.CodeType] = set()
        self._classes: set[type] = set()
        self._globals: dict[int, set[str]] = {}
        """The globals that are already compared, by the ``id`` of their namespace."""
        self._labels: dict[str, Any] = {}
        self._todo: deque[tuple[Any, str, Node | None, Callable[[Any], Any], int]] = deque()
        # FSDP moves tensors between forward and backward, and restores them itself.
        self._narrow = is_sharded(self.module)
        for path, each in self.module.named_modules():
            self._visit_module(each, f"{path}." if path else "", None, _itself, 0)
        if not self._narrow:
            self._visit_global_hooks()
        while self._todo and len(self.nodes) < MOST:
            self._visit(*self._todo.popleft())

    def _add(self, node: Node) -> Node:
        self.nodes.append(node)
        return node

    def _unique(self, label: str, thing: Any) -> str:
        """Return a label that no other object has."""
        count, own = 1, label
        while self._labels.setdefault(own, thing) is not thing:
            count += 1
            own = f"{label} ({count})"
        return own

    def _later(
        self, thing: Any, name: str, up: Node | None, step: Callable[[Any], Any], depth: int
    ) -> None:
        if not isinstance(thing, PLAIN) and id(thing) not in self._seen and depth <= DEPTH:
            self._todo.append((thing, name, up, step, depth))

    def _names(
        self,
        kind: Names,
        thing: Any,
        name: str,
        inside: str,
        up: Node | None,
        step: Callable[[Any], Any],
        depth: int,
        only: tuple[str, ...] | None = None,
    ) -> Node:
        """Compare a namespace, and enter the objects that its names refer to."""
        node = Node(name, thing, up, step, depth, kind, only=only, inside=inside)
        node.content = node.names()
        for own, held in node.content.items():
            self._later(held, inside + own, node, _named(kind, own), depth + 1)
        return self._add(node)

    def _visit(
        self, thing: Any, name: str, up: Node | None, step: Callable[[Any], Any], depth: int
    ) -> None:
        if id(thing) in self._seen:
            return
        name = self._unique(name, thing)
        at = name, up, step, depth
        if isinstance(thing, nn.Module):
            self._visit_module(thing, f"{name}.", up, step, depth)
            return
        self._seen.add(id(thing))
        if isinstance(thing, nn.Parameter):
            if not is_lazy(thing):
                self._add(Node(name, thing, up, step, depth, FLAG, thing.requires_grad))
        elif isinstance(thing, types.FunctionType):
            self._visit_function(thing, *at)
        elif isinstance(thing, types.MethodType):
            bound = Node(name, thing, up, step, depth, HELD_BY_FUNCTION)
            self._later(thing.__self__, name, bound, lambda m: m.__self__, depth)
            self._later(thing.__func__, name, bound, lambda m: m.__func__, depth)
        elif isinstance(thing, functools.partial):
            self._visit_partial(thing, *at)
        elif isinstance(thing, type):
            self._visit_class(thing)
        elif not isinstance(thing, (types.ModuleType, types.BuiltinFunctionType, Optimizer, Enum)):
            self._visit_object(thing, *at)

    def _visit_object(
        self, thing: Any, name: str, up: Node | None, step: Callable[[Any], Any], depth: int
    ) -> None:
        if (kind := kind_of(thing)) is not None:
            content = None if kind.copies else kind.read(thing)
            node = self._add(Node(name, thing, up, step, depth, kind, content))
            for label, key, held in kind.inner(content):
                self._later(held, f"{name}{label}", node, _item(key), depth + 1)
        root = type(thing).__module__.partition(".")[0]
        if root in _CLOSED and root not in ("collections", "types"):
            return
        if hasattr(thing, "__dict__"):
            self._names(VARS, thing, name, f"{name}.", up, step, depth)
        if any("__slots__" in vars(cls) for cls in type(thing).__mro__) and _slots(thing):
            self._names(SLOTS, thing, name, f"{name}.", up, step, depth)
        self._visit_class(type(thing))

    # --- modules ---------------------------------------------------------------------------

    def _visit_module(
        self, module: nn.Module, path: str, up: Node | None, step: Callable[[Any], Any], depth: int
    ) -> None:
        if id(module) in self._seen or _is_lazy(module):
            return
        self._seen.add(id(module))
        for prefix in ("attribute ", "global ", "hook "):
            path = path.removeprefix(prefix)
        if self._narrow:
            self._visit_narrowly(module, path)
            return
        at = up, step, depth
        inside = f"attribute {path}"
        attributes = self._names(ATTRIBUTES, module, f"module {path}", inside, *at)
        if isinstance(module, torch.jit.ScriptModule):
            for name, buffer in module.named_buffers(recurse=False):
                self._later(buffer, f"buffer {path}{name}", attributes, _itself, depth)
            return
        self._names(BUFFERS, module, f"buffers of {path}", f"buffer {path}", *at)
        self._visit_dicts(module, path, at)
        if type(module) in self._classes:
            return
        self._classes.add(type(module))
        self._visit_class(type(module))
        for function in _methods(type(module)):
            self._later(function, function.__qualname__, None, _itself, depth + 1)

    def _visit_dicts(
        self, module: nn.Module, path: str, at: tuple[Node | None, Callable[[Any], Any], int]
    ) -> None:
        """Compare the dictionaries that every module has, and enter the hooks in them."""
        content = _read_dicts(module)
        label = f"hooks, weights and children of {path.rstrip('.') or 'the model'}"
        node = self._add(Node(label, module, *at, MODULE, content))
        for key, parameter in content.get("_parameters", ()):
            step = _entry("_parameters", key)
            self._later(parameter, f"parameter {path}{key}", node, step, 1)
            for hook in () if parameter is None else hooks_of_script(parameter):
                self._later(hook, _hook_name(f"{path}{key} ", hook), None, _itself, 1)
        for name in HOOKS:
            for key, hook in content.get(name, ()):
                self._later(hook, _hook_name(path, hook), node, _entry(name, key), 1)

    def _visit_narrowly(self, module: nn.Module, path: str) -> None:
        """Compare only the buffers and plain attributes of a sharded model."""
        plain = tuple(n for n, v in vars(module).items() if isinstance(v, PLAIN))
        inside = f"attribute {path}"
        self._names(VARS, module, f"module {path}", inside, None, _itself, 0, plain)
        self._names(BUFFERS, module, f"buffers of {path}", f"buffer {path}", None, _itself, 0)

    def _visit_global_hooks(self) -> None:
        for name in _GLOBAL_HOOKS:
            held = getattr(torch_modules, name)
            node = self._add(
                Node(f"global {name}", held, None, _itself, 0, QUIET_DICT, tuple(held.items()))
            )
            for key, hook in held.items():
                self._later(hook, _hook_name("", hook), node, _item(key), 1)

    # --- code ------------------------------------------------------------------------------

    def _visit_function(
        self,
        function: types.FunctionType,
        name: str,
        up: Node | None,
        step: Callable[[Any], Any],
        depth: int,
    ) -> None:
        package = (function.__module__ or "").partition(".")[0]
        if package in ("torch", "autofit"):
            wrapped = getattr(function, "__wrapped__", None)
            self._later(wrapped, name, up, lambda f: f.__wrapped__, depth + 1)
            return
        at = (up, step, depth)
        self._names(CELLS, function, name, f"{name}.", *at)
        self._names(VARS, function, name, f"{name}.", *at)
        node = self.nodes[-1]
        self._later(function.__defaults__, name, node, lambda f: f.__defaults__, depth)
        self._later(function.__kwdefaults__, name, node, lambda f: f.__kwdefaults__, depth)
        self._visit_code(function, depth)

    def _visit_partial(
        self,
        thing: functools.partial[Any],
        name: str,
        up: Node | None,
        step: Callable[[Any], Any],
        depth: int,
    ) -> None:
        node = Node(name, thing, up, step, depth, HELD_BY_FUNCTION)
        self._later(thing.func, name, node, lambda p: p.func, depth + 1)
        self._later(thing.args, f"{name} arguments", node, lambda p: p.args, depth + 1)
        self._later(thing.keywords, f"{name} arguments", node, lambda p: p.keywords, depth + 1)

    def _visit_code(self, function: types.FunctionType, depth: int) -> None:
        """Compare the globals that a function of the user names, and enter them."""
        if function.__code__ in self._codes or not _is_users(function.__globals__):
            return
        self._codes.add(function.__code__)
        names = named_in(function.__code__)
        known = self._globals.setdefault(id(function.__globals__), set())
        fresh = tuple(name for name in names if name not in known)
        known.update(fresh)
        label = f"globals of {function.__module__}"
        node = Node(label, function, None, _itself, depth, GLOBALS, only=fresh, inside="global ")
        node.content = node.names()
        self._add(node)
        for name, held in node.content.items():
            step = _named(GLOBALS, name)
            if isinstance(held, types.ModuleType):
                self._visit_users_module(held, names, node, step, depth)
            else:
                self._later(held, f"global {name}", node, step, depth + 1)

    def _visit_users_module(
        self,
        module: types.ModuleType,
        names: tuple[str, ...],
        up: Node,
        step: Callable[[Any], Any],
        depth: int,
    ) -> None:
        if _is_users(vars(module)):
            short = module.__name__.rpartition(".")[2]
            only = tuple(name for name in names if name in vars(module))
            self._names(VARS, module, short, f"global {short}.", up, step, depth + 1, only)

    def _visit_class(self, cls: type) -> None:
        """Compare the class attributes of the user's own classes."""
        for each in cls.__mro__:
            module = sys.modules.get(each.__module__)
            if id(each) in self._seen or module is None or not _is_users(vars(module)):
                continue
            self._seen.add(id(each))
            inside = f"class attribute {each.__name__}."
            self._names(CLASS, each, f"class {each.__name__}", inside, None, _itself, 1)


ATTRIBUTES = Names(
    lambda module: {name: v for name, v in vars(module).items() if name not in _DICTS},
    VARS.write,
)
"""The attributes of a module without the dictionaries that every module has."""
QUIET_DICT = Kind(DICT.read, DICT.write, lambda _, items: len(items))
"""A dictionary that is compared by its length: its items are places of their own."""


def _read_dicts(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    held = vars(module)
    return {
        name: tuple(held[name].items())
        for name in _DICTS
        if name != "_buffers" and isinstance(held.get(name), dict)
    }


def _write_dicts(module: nn.Module, content: dict[str, tuple[Any, ...]]) -> bool:
    held = vars(module)
    return all([DICT.write(held[name], items) for name, items in content.items()])


MODULE = Kind(
    _read_dicts, _write_dicts, lambda _, content: tuple(len(each) for each in content.values())
)
"""The dictionaries that every module has: their items are places of their own."""


def _entry(name: str, key: Any) -> Callable[[Any], Any]:
    return lambda module: vars(module)[name][key]


def _itself(thing: Any) -> Any:
    return thing


def _item(key: Any) -> Callable[[Any], Any]:
    return lambda held: held[key]


def _named(kind: Names, name: str) -> Callable[[Any], Any]:
    return lambda thing: kind.read(thing)[name]


def _hook_name(path: str, hook: Any) -> str:
    inner = hook.func if isinstance(hook, functools.partial) else hook
    own = getattr(inner, "__name__", type(inner).__name__)
    return f"hook {path}{own}"


def _is_lazy(module: nn.Module) -> bool:
    """Return whether a module changes its class at its first call."""
    held = (*module._parameters.values(), *module._buffers.values())
    return any(is_lazy(each) for each in held if each is not None)


def _excluded() -> set[int]:
    """Return the ``id`` of each generator that ``RandomState`` restores."""
    found: list[Any] = [torch.default_generator, getattr(random, "_inst", None)]
    found += accelerator.generators()
    if (numpy := sys.modules.get("numpy.random")) is not None:
        found.append(getattr(numpy.mtrand, "_rand", None))
    return {id(each) for each in found if each is not None}


def _is_users(namespace: Mapping[str, Any]) -> bool:
    """Return whether a module's code is the user's own, not a library's or autofit's."""
    if str(namespace.get("__name__", "")).partition(".")[0] in _CLOSED:
        return False
    return not is_library(str(namespace.get("__file__")))


def _methods(cls: type) -> Iterator[types.FunctionType]:
    """Yield the user's functions that a call of a module runs: ``forward``, and those it names."""
    todo, seen = ["forward", "__call__"], set[str]()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        found = inspect.getattr_static(cls, name, None)
        for function in _functions(found):
            if _is_users(function.__globals__):
                yield function
                todo += named_in(function.__code__)


def _functions(found: Any) -> Iterator[types.FunctionType]:
    """Yield the functions behind a class attribute, such as a property or a decorated method."""
    for name in ("fget", "fset", "func", "__func__"):
        if not isinstance(found, types.FunctionType):
            found = getattr(found, name, None) or found
    while isinstance(found, types.FunctionType):
        yield found
        found = getattr(found, "__wrapped__", None)


@functools.cache
def named_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names in a code object and in the functions inside it."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return tuple(dict.fromkeys((*code.co_names, *(n for each in inner for n in named_in(each)))))
