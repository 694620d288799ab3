"""What each call of a model moves on whatever its samples: a count of calls, a power iteration.

The parts of a split call must all find it as the whole would have, and it must move on once: each
part but the first starts where the first did, and leaves what it found.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autofit.strategies.base import Forward

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Kinds of attributes that cannot be changed in place."""
_PLAIN = frozenset(PLAIN)
"""The same, to look up in: a model has thousands of attributes."""


@dataclass(frozen=True, slots=True)
class Place:
    """A buffer of a module, or one of its attributes that holds a plain value."""

    owner: weakref.ref[nn.Module]
    name: str
    buffer: bool

    def read(self) -> Any:
        """Return what is there now."""
        if not self.buffer:
            return vars(self._module()).get(self.name)
        tensor = self.tensor()
        return tensor, None if tensor is None else tensor.detach().clone()

    def tensor(self) -> torch.Tensor | None:
        """Return the buffer."""
        return self._module()._buffers.get(self.name) if self.buffer else None

    def write(self, value: Any) -> None:
        """Put back what ``read`` returned."""
        if not self.buffer:
            vars(self._module())[self.name] = value
            return
        tensor, copy = value
        self._module()._buffers[self.name] = tensor
        if tensor is not None and not torch.equal(tensor, copy):  # a graph may have saved it
            with torch.no_grad():
                tensor.copy_(copy)

    def _module(self) -> nn.Module:
        module = self.owner()
        assert module is not None, "a model outlives its calls"
        return module


def places(module: nn.Module) -> dict[str, Place]:
    """Return the places in a module and its children, each by its name."""
    found = {}
    for prefix, each in module.named_modules():
        path, owner = f"{prefix}." if prefix else "", weakref.ref(each)
        for name in each._buffers:
            found[f"buffer {path}{name}"] = Place(owner, name, True)
        for name, value in vars(each).items():
            if type(value) in _PLAIN:
                found[f"attribute {path}{name}"] = Place(owner, name, False)
    return found


class Once:
    """A forward that moves the model on the first time it is called, and never again."""

    def __init__(self, forward: Forward, moved: Sequence[Place]) -> None:
        self._forward = forward
        self._moved = moved
        self._start: list[Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it on some samples."""
        found = [place.read() for place in self._moved]
        start, self._start = self._start, self._start or found
        self._put(self._start)
        try:
            output = self._forward(*args, **kwargs)
        except BaseException:
            self._start = start
            self._put(found)
            raise
        if start is not None:
            self._put(found)
        return output

    def _put(self, values: Sequence[Any]) -> None:
        for place, value in zip(self._moved, values, strict=True):
            place.write(value)


def once(forward: Forward, moved: Sequence[Place]) -> Forward:
    """Return ``forward`` as the parts of one call are to see it."""
    return Once(forward, moved) if moved else forward


SMALL = 1 << 22
"""Of buffers with no more elements the values are compared; of larger ones the versions, which
batch statistics leave as they are, and compiled code does not."""

FAR = 1.75
"""Times as far as it would that a buffer may move where all else is chance; twice is 1.9."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a buffer has changed by."""

    by: torch.Tensor
    size: torch.Tensor
    """The norm of what it held."""
    versions: int

    @classmethod
    def of(cls, tensor: torch.Tensor, before: torch.Tensor, versions: int) -> Change:
        """Return it, in double precision."""
        old = before.double()
        return cls(tensor.detach().double() - old, old.norm(), versions)

    def is_like(self, other: Change, noise: float | None = 0.0) -> bool:
        """Return whether both are one, as far as rounding to bf16 lets that be seen.

        ``noise``: the relative difference that it makes where that is known to be more; ``None``
        where only how far each moved tells. What settles as it moves, a power iteration, shows in
        its versions that it moved twice.
        """
        apart = (self.by - other.by).norm()
        if self.versions > other.versions > 0 and bool(apart > other.size / 10**5):
            return False
        if noise is None:
            short, long = sorted((float(self.by.norm()), float(other.by.norm())))
            return long <= FAR * short + float(other.size) / 100
        return not bool(apart > other.by.norm() * max(0.1, noise) + other.size / 100)


class Moves:
    """What a forward and its backward move in a module."""

    def __init__(self, module: nn.Module) -> None:
        self._places = places(module)
        self._buffers = self._versions()
        self._small = {
            name: tensor.detach().clone()
            for name, (tensor, _) in self._buffers.items()
            if tensor.numel() <= SMALL and not tensor.is_complex()
        }
        self._attributes = self._values()

    def since(self) -> dict[str, Any]:
        """Return what each buffer has changed by or how often, and attributes as they are now."""
        found: dict[str, Any] = {}
        for name, (tensor, version) in self._versions().items():
            before, first = self._buffers.get(name, (None, 0))
            if tensor is before and name in self._small:
                if not torch.equal(tensor, self._small[name]):
                    found[name] = Change.of(tensor, self._small[name], version - first)
            elif tensor is before:
                found |= {name: version - first} if version != first else {}
            elif not tensor.is_floating_point():
                found[name] = tensor.tolist()
        values = self._values()
        return found | {n: v for n, v in values.items() if v != self._attributes.get(n)}

    def _versions(self) -> dict[str, tuple[torch.Tensor, int]]:
        tensors = {name: place.tensor() for name, place in self._places.items()}
        return {
            name: (tensor, tensor._version)
            for name, tensor in tensors.items()
            if tensor is not None and not tensor.is_inference()
        }

    def _values(self) -> dict[str, Any]:
        """Return the plain attributes that are no fractions, which rounding may change."""
        values = {n: place.read() for n, place in self._places.items() if not place.buffer}
        told = _PLAIN - {float, complex}  # a table that was made meanwhile is not one of them
        return {n: v for n, v in values.items() if type(v) in told}


def moved_otherwise(
    found: dict[str, Any], expected: dict[str, Any], noise: float | None = 0.0
) -> list[str]:
    """Return what moved in another way: buffers more often, attributes to something else.

    ``noise``: the relative difference that rounding may make. Not what moved in one of them alone:
    a table is made once, a switch may be the plan's own.
    """
    names = []
    for name, value in found.items():
        if isinstance(value, Change):
            other = not (name in expected and value.is_like(expected[name], noise))
        elif name.startswith("buffer") and isinstance(value, int):
            other = value > expected.get(name, 0)
        else:
            other = value != expected.get(name, value)
        names += [name] if other else []
    return names


class Attributes:
    """The plain attributes of a module and its children, as they are when this is made."""

    def __init__(self, module: nn.Module) -> None:
        self._held = [
            (held, name, value)
            for held in map(vars, module.modules())
            for name, value in held.items()
            if type(value) in _PLAIN
        ]

    def restore(self) -> None:
        """Set those that have changed back."""
        _write(each for each in self._held if each[0].get(each[1]) is not each[2])

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within it they are so again."""
        other = [each for each in self._held if each[0].get(each[1]) is not each[2]]
        now = [(held, name, held.get(name)) for held, name, _ in other]
        _write(other)
        try:
            yield
        finally:
            _write(now)


def _write(values: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
    for held, name, value in values:
        held[name] = value


@contextmanager
def unmoved(module: nn.Module) -> Iterator[None]:
    """Leave the module's buffers and plain attributes as they are now."""
    before = [(place, place.read()) for place in places(module).values()]
    kinds = {id(each): type(each) for each in module.modules()}
    try:
        yield
    finally:
        for place, value in before:
            owner = place.owner()
            if owner is not None and type(owner) is kinds.get(id(owner)):  # lazy ones become others
                place.write(value)
