"""What each call of a model moves on whatever its samples: a count of calls, a power iteration.

The parts of a split call must all find it as the whole would have, and it must move on once: each
part but the first starts where the first did, and leaves what it found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autofit.strategies.base import Forward
from autofit.worker.harness.torch_state.reachable_state import (
    ABSENT,
    Key,
    Place,
    Snapshot,
    changes,
    equal,
)
from autofit.worker.harness.torch_state.state_kinds import PLAIN, TENSOR, Large

_PLAIN = frozenset(PLAIN)
"""To look up in: a model has thousands of attributes."""


class FirstCallUpdates:
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

    def restore(self) -> None:
        """Put the model back to where it was before the first of the calls."""
        if self._start is not None:
            self._put(self._start)

    def _put(self, values: Sequence[Any]) -> None:
        for place, value in zip(self._moved, values, strict=True):
            place.write(value)


def update_at_first_call(forward: Forward, moved: Sequence[Place]) -> Forward:
    """Return ``forward`` as the parts of one call are to see it."""
    return FirstCallUpdates(forward, moved) if moved else forward


COMPARED = 1 << 22
"""Of tensors with no more elements the changes are compared; of larger ones how often they were
changed in place."""

BUFFER, MEAN = "buffer ", "running_mean"
FAR = 1.75
"""Times as far as it would that a buffer may move where all else is chance; twice is 1.9."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a buffer has changed by."""

    by: torch.Tensor
    size: torch.Tensor
    """The norm of what it held, or of the deviations whose means it holds if that is larger."""
    versions: int

    @classmethod
    def of(
        cls,
        tensor: torch.Tensor,
        before: torch.Tensor,
        versions: int,
        deviation: torch.Tensor | None = None,
    ) -> Change:
        """Return it, in double precision; ``deviation``: of what the buffer holds means of."""
        old = before.double()
        size = old.norm() if deviation is None else torch.maximum(old.norm(), deviation)
        return cls(tensor.detach().double() - old, size, versions)

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

    def is_near(self, other: Change, tolerance: float) -> bool:
        """Return whether both are one but for the order of sums."""
        if self.versions > other.versions > 0:
            return False
        apart = (self.by - other.by).norm()
        return not bool(apart > tolerance * (other.by.norm() + other.size))


@dataclass(frozen=True, slots=True)
class NewValue:
    """What a place other than a buffer has come to hold."""

    value: Any
    versions: int = 0
    """How often a tensor was changed in place."""


def updates_since(start: Snapshot) -> dict[Key, Change | NewValue]:
    """Return what has changed since ``start`` of what a model's calls can reach."""
    now = Snapshot(start.module, copies=False)
    return {key: _change(start, now, key) for key in changes(start, now)}


def _change(start: Snapshot, now: Snapshot, key: Key) -> Change | NewValue:
    before, after = start.node_of.get(key), now.node_of.get(key)
    if before is None or after is None:
        return NewValue(now.values.get(key, ABSENT))
    thing, versions = after.thing, 0
    if after.kind is not TENSOR or before.thing is not thing:
        return NewValue(now.values[key])
    if not thing.is_inference():
        versions = thing._version - before.content.version.prev_versions[0]
    content = before.content
    alike = thing.shape == content.alias.shape and thing.dtype == content.alias.dtype
    if content.copy is None or not alike or thing.is_complex() or thing.numel() > COMPARED:
        return NewValue(now.values[key], versions)
    deviation = _deviation(start.module, key[0])
    return Change.of(thing, content.copy.numbers(thing), versions, deviation)


def _deviation(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the norm of the deviations of which a batch's means go into a buffer of means.

    Features have means near zero: what rounding makes of those is large beside them, and small
    beside the features.
    """
    path, _, own = name.removeprefix(BUFFER).rpartition(".")
    if not name.startswith(BUFFER) or own != MEAN:
        return None
    norm = module.get_submodule(path)
    variance, momentum = norm._buffers.get("running_var"), getattr(norm, "momentum", None)
    if variance is None:
        return None
    share = momentum if isinstance(momentum, float) else 1.0
    deviation: torch.Tensor = variance.detach().double().clamp(min=0.0).sqrt().norm()
    return share * deviation


def different_updates(
    found: dict[Key, Change | NewValue],
    expected: dict[Key, Change | NewValue],
    noise: float | None = 0.0,
    *,
    exact: float | None = None,
) -> list[str]:
    """Return what moved in another way: tensors by more or more often, the rest to another value.

    ``noise``: the relative difference that rounding may make to buffers. ``exact``: the one that
    may be made to the rest, where nothing rounds but the order of sums. Else what moved in one of
    them alone is none of it, buffers aside: a switch may be the plan's own.
    """
    keys = found if exact is None else dict.fromkeys((*found, *expected))
    return list(
        dict.fromkeys(
            name
            for name, part in keys
            if not _alike(name, found.get((name, part)), expected.get((name, part)), noise, exact)
        )
    )


def _alike(
    name: str,
    found: Change | NewValue | None,
    expected: Change | NewValue | None,
    noise: float | None,
    exact: float | None,
) -> bool:
    buffer = name.startswith("buffer")
    if isinstance(found, Change) and isinstance(expected, Change):
        if buffer or exact is None:
            return found.is_like(expected, noise if buffer else None)
        return found.is_near(expected, exact)
    if found is None or expected is None:
        return exact is None and not (buffer and found is not None)
    if isinstance(found, Change) or isinstance(expected, Change):
        return exact is None and not buffer
    if found.versions > expected.versions > 0:
        return False
    return near(found.value, expected.value, exact)


def near(one: Any, other: Any, tolerance: float | None) -> bool:
    """Return whether two values of a place are equal, their fractions within ``tolerance``.

    ``None``: whatever the fractions are, which a lower precision makes other ones of.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape:
            return False
        if not one.is_floating_point():
            return equal(one, other)
        return tolerance is None or _close(one.double(), other.double(), tolerance)
    if isinstance(one, Large) and isinstance(other, Large):
        return one.shape == other.shape  # its versions have told how often it was changed
    if isinstance(one, tuple) and isinstance(other, tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(near(a, b, tolerance) for a, b in pairs)
    if isinstance(one, (float, complex)) and isinstance(other, (float, complex)):
        return tolerance is None or _close(torch.tensor(one), torch.tensor(other), tolerance)
    return equal(one, other)


def _close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    if not one.numel():
        return True
    apart = torch.where(one.isnan() & other.isnan(), 0.0, one - other).norm()
    return not bool(apart > tolerance * other.nan_to_num().norm())


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
