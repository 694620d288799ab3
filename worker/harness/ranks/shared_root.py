"""Divides the calls of a root among the ranks, or those of its parts.

Each call starts from rank 0's arguments. A model that compares its samples cannot be divided. It
runs whole on every rank, and the calls of its submodules are divided. What is left of it gives the
same gradients on every rank, without a sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from autofit.strategies.base import Forward, Undo, Wrapper
from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.ranks.batch_norm import SharedStatistics, has_batch_norm
from autofit.worker.harness.ranks.group import RankGroup
from autofit.worker.harness.ranks.lockstep import (
    Comparisons,
    same_arguments,
    same_generators,
    same_weights,
)
from autofit.worker.harness.ranks.shared_call import DividedCalls
from autofit.worker.harness.torch_state.modules import transformed, without_cache
from autofit.worker.harness.torch_state.undo import temporarily
from autofit.worker.harness.verification.splits import Splits

LEAST = 1 / 20
"""The share of a model's weights from which a submodule is worth the gathering of its output."""


class SharedRoot(DividedCalls):
    """Divides the calls of one root among the ranks of ``group``."""

    def __init__(
        self,
        splits: Splits,
        seams: Seams,
        group: RankGroup,
        calls: Calls,
        splits_of: Callable[[nn.Module], Splits],
        *,
        strict: bool,
    ) -> None:
        """``splits_of`` tells how the calls of a submodule are split."""
        module = splits.root.module
        joins = has_batch_norm(module)
        statistics = SharedStatistics(seams.patches, module) if joins else None
        super().__init__(splits, seams, group, statistics, strict=strict)
        self.parts = InnerRoots(module, calls, self._part)
        self._splits_of = splits_of
        self._comparisons = Comparisons()
        self._follows = False
        """The arguments were not the same on all ranks: each call uses those of rank 0."""
        self._stale: list[torch.Tensor] = []
        """What calls have computed whole, so that rounding may differ between the ranks."""
        same_generators(group)
        same_weights(group, self.name, _weights(module))

    def remove(self) -> None:
        """Leave torch and the modules as they were."""
        self.parts.remove()
        self._stale = []
        if self.statistics is not None:
            self.statistics.remove()
            self.splits.by_sample = nullcontext

    def _part(self, module: nn.Module) -> DividedCalls:
        """Return what divides the calls of a submodule, while those of the root run whole."""
        statistics = self.statistics if has_batch_norm(module) else None
        return DividedCalls(self._splits_of(module), self.seams, self.group, statistics)

    def around(self, run: Forward) -> Forward:
        """Return ``run``, a call of a batch, for a batch that is divided among ranks."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or transformed():
                if self.sharded is not None:
                    return self.sharded.evaluate(run, args, kwargs)
                return run(*args, **kwargs)
            return self._call(run, args, kwargs)

        return call

    def _call(self, run: Forward, args: Any, kwargs: Any) -> Any:
        compared = self._comparisons.due()
        if compared or self._follows:
            batch = Batch.of(args, kwargs)
            batch, same = same_arguments(self.group, self.name, batch, compare=not self._follows)
            self._follows = not same
            args, kwargs = batch.call(batch.leaves)
        if self._stale:
            same_weights(self.group, self.name, self._stale)
            self._stale = []
        batch = Batch.of(args, without_cache(self.splits.root.module, kwargs))
        layout, reason = self.layout(batch)
        if self.sharded is not None:
            if reason:
                self.tell_whole(reason)
            return self.sharded.call(self, run, batch, layout, compared=compared)
        if layout is not None:
            found = self.divided(run, batch, layout, compared=compared)
            if isinstance(found, tuple):
                return found[0]
            reason = found
        return self._whole(run, args, kwargs, reason, compared=compared)

    def _whole(self, run: Forward, args: Any, kwargs: Any, reason: str, *, compared: bool) -> Any:
        """Run a call whole on every rank, except its parts whose calls can be divided.

        ``reason``: why the whole call cannot be; empty if it would only be pointless.
        """
        with self.parts.divided(tries=bool(reason), compared=compared) as divided:
            output = run(*args, **kwargs)
        if reason and not divided:
            self.tell_whole(reason)
        inside = {id(each) for part in divided for each in _weights(part)}
        self._stale = [each for each in _weights(self.splits.root.module) if id(each) not in inside]
        return output


class InnerRoots:
    """Divides the calls of a model's submodules while a call of the model runs whole.

    A submodule that is called inside a divided one is divided with it. Where a submodule cannot be
    divided, its own submodules are tried.
    """

    def __init__(
        self, module: nn.Module, calls: Calls, part: Callable[[nn.Module], DividedCalls]
    ) -> None:
        self._module = weakref.ref(module)
        self._calls = calls
        self._part = part
        self._parts: dict[int, DividedCalls] = {}
        self._tries = False
        """Calls of submodules are tried."""
        self._compared = False
        self._divided: list[nn.Module] = []
        self._undos: list[Undo] = []

    @contextmanager
    def divided(self, *, tries: bool, compared: bool) -> Iterator[list[nn.Module]]:
        """Divide the calls of submodules within this context; yield those that were.

        ``tries``: else none is divided. ``compared``: the ranks compare what they find.
        """
        if tries and not self._undos:
            self._wrap()
        self._divided, self._compared = [], compared
        divided = self._divided
        try:
            with temporarily(self, "_tries", tries):
                yield divided
        finally:
            self._divided = []  # the script may drop its model

    def _wrap(self) -> None:
        module = self._module()
        assert module is not None, "a model is alive while it is called"
        whole = _count(module)
        for each in module.modules():
            lookup = isinstance(each, nn.Embedding | nn.EmbeddingBag)  # it is no work
            if each is not module and not lookup and _count(each) >= max(1, LEAST * whole):
                self._undos.append(self._calls.wrap(each, self._around(each)))

    def _around(self, module: nn.Module) -> Wrapper:
        held = weakref.ref(module)

        def wrapper(run: Forward) -> Forward:
            def call(*args: Any, **kwargs: Any) -> Any:
                if not self._tries or not torch.is_grad_enabled():
                    return run(*args, **kwargs)
                with temporarily(self, "_tries", False):
                    found = self._call(held(), run, Batch.of(args, kwargs))  # type: ignore[arg-type]
                return found[0] if isinstance(found, tuple) else run(*args, **kwargs)

            return call

        return wrapper

    def _call(self, module: nn.Module, run: Forward, batch: Batch) -> tuple[Any] | str:
        part = self._parts.get(id(module))
        if part is None:
            part = self._parts[id(module)] = self._part(module)
        layout, reason = part.layout(batch)
        if layout is None:
            return reason
        found = part.divided(run, batch, layout, compared=self._compared)
        if isinstance(found, tuple):
            self._divided.append(module)
        return found

    def remove(self) -> None:
        """Leave the modules as they were."""
        while self._undos:
            self._undos.pop()()
        self._parts.clear()


def _weights(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _count(module: nn.Module) -> int:
    """Return how many numbers of a module are trained."""
    return sum(each.numel() for each in module.parameters() if each.requires_grad)
