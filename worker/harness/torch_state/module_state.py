"""State that every call of a model updates, such as a count of calls or a power iteration.

A split call must update it once, and each chunk must see it as the whole batch would. So each chunk
starts from the first chunk's state, and later chunks undo their own updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

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

PLAIN_TYPES = frozenset(PLAIN)
"""A frozenset for fast lookup, because a model has thousands of attributes."""


class FirstCallUpdates:
    """A forward whose updates of the model's state count only at the first call."""

    def __init__(self, forward: Forward, places: Sequence[Place]) -> None:
        self._forward = forward
        self._places = places
        self._start: list[Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward on some samples."""
        found = [place.read() for place in self._places]
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
        """Restore the state before the first call."""
        if self._start is not None:
            self._put(self._start)

    def _put(self, values: Sequence[Any]) -> None:
        for place, value in zip(self._places, values, strict=True):
            place.write(value)


def update_at_first_call(forward: Forward, places: Sequence[Place]) -> Forward:
    """Return ``forward`` for the chunks of one call, of which only the first updates ``places``."""
    return FirstCallUpdates(forward, places) if places else forward


COMPARED = 1 << 22
"""Changes of tensors with at most this many elements are compared; of larger ones, the versions."""

BUFFER, MEAN = "buffer ", "running_mean"
ROUNDED = 1e-6
"""Under a smaller tolerance, buffers may differ by no rounding either."""
FAR = 1.75
"""The ratio of two changes that noise may cause; an update that runs twice has a ratio of 1.9."""


@dataclass(frozen=True, slots=True)
class Change:
    """The change of a buffer."""

    by: torch.Tensor
    size: torch.Tensor
    """The norm of the buffer before, or of the standard deviations whose means it has, if
    larger."""
    versions: int

    @classmethod
    def of(
        cls,
        tensor: torch.Tensor,
        before: torch.Tensor,
        versions: int,
        deviation: torch.Tensor | None = None,
    ) -> Change:
        """Return the change in double precision.

        ``deviation``: the norm of the standard deviations.
        """
        old = before.double()
        size = old.norm() if deviation is None else torch.maximum(old.norm(), deviation)
        return cls(tensor.detach().double() - old, size, versions)

    def is_like(self, other: Change, noise: float | None = 0.0) -> bool:
        """Return whether both changes are equal within the rounding of bf16.

        ``noise``: the relative difference that rounding makes, if it is known to be larger;
        ``None`` to compare only norms. A power iteration converges, so its value hardly changes
        when it is updated twice. Its version shows that.
        """
        apart = (self.by - other.by).norm()
        if self.versions > other.versions > 0 and bool(apart > other.size / 10**5):
            return False
        if noise is None:
            short, long = sorted((float(self.by.norm()), float(other.by.norm())))
            return long <= FAR * short + float(other.size) / 100
        return not bool(apart > other.by.norm() * max(0.1, noise) + other.size / 100)

    def is_near(self, other: Change, tolerance: float) -> bool:
        """Return whether both changes are equal up to the order of sums."""
        if self.versions > other.versions > 0:
            return False
        apart = (self.by - other.by).norm()
        return not bool(apart > tolerance * (other.by.norm() + other.size))


@dataclass(frozen=True, slots=True)
class NewValue:
    """The new value of a place that is not a buffer."""

    value: Any
    versions: int = 0
    """The number of changes in place of a tensor."""


def updates_since(start: Snapshot) -> dict[Key, Change | NewValue]:
    """Return the changes since ``start`` of the state that a model's calls can reach."""
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
    """Return the norm of the standard deviations that belong to a buffer of running means.

    Features may have means near zero. Rounding is large relative to such a mean, but small relative
    to the feature's deviation.
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
    """Return the names of state with another update than expected.

    Tensors must change by the same amount and as often; other values must be equal. ``noise`` is
    the relative difference that rounding may make to buffers. ``exact`` is the one allowed for
    everything else if only the order of sums differs. Without ``exact``, a value other than a
    buffer that changed on one side only is ignored, because the plan may have set a switch.
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
        if exact is None or (buffer and exact > ROUNDED):
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
    """Return whether two values are equal, floating-point entries within ``tolerance``.

    With ``None``, floating-point entries may have any value, because a lower precision changes
    them.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape:
            return False
        if not one.is_floating_point():
            return equal(one, other)
        return tolerance is None or _close(one.double(), other.double(), tolerance)
    if isinstance(one, Large) and isinstance(other, Large):
        return one.shape == other.shape  # the versions tell how often it was changed
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
    """The plain attributes of some modules, which are not held, at the time of construction."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._held = [
            (
                ref(module),
                [pair for pair in vars(module).items() if type(pair[1]) in PLAIN_TYPES],
            )
            for module in modules
        ]

    def _changed(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return the attributes that have changed, with the values that they had."""
        there = ((module(), pairs) for module, pairs in self._held)
        own = ((vars(module), pairs) for module, pairs in there if module is not None)
        return [
            (held, name, value)
            for held, pairs in own
            for name, value in pairs
            if held.get(name) is not value
        ]

    def restore(self) -> None:
        """Restore the attributes that have changed."""
        _write(self._changed())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the attributes within the context."""
        other = self._changed()
        now = [(held, name, held.get(name)) for held, name, _ in other]
        _write(other)
        try:
            yield
        finally:
            _write(now)


def _write(values: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
    for held, name, value in values:
        held[name] = value
