"""Verifies that the losses of parts add up to the loss of a step. Imports torch.

The same check decides the splits of ``autofit run`` (``verification.split_check``): a few samples
run together and in parts, and their losses and gradients are compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from autofit.resilience.arguments import ArgumentPlace, Arguments, inject
from autofit.resilience.batch import loss_of
from autofit.worker.harness.batch.layout import Batch, Layout, Weights
from autofit.worker.harness.torch_state.module_watch import ModuleWatch
from autofit.worker.harness.torch_state.reachable_state import Snapshot
from autofit.worker.harness.verification.layout_cache import Layouts
from autofit.worker.harness.verification.proof_cache import Known
from autofit.worker.harness.verification.split_check import find_layout


class _Call:
    """A call of a step function without its batch."""

    def __init__(self, function: Callable[..., Any], place: ArgumentPlace) -> None:
        self._function = function
        self._place = place
        self.rest: Arguments = ((), {})

    def loss(self, value: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        args, kwargs = inject([self._place], [value], self.rest)
        return loss_of(self._function(*args, **kwargs))

    def state(self) -> Snapshot:
        """Copy the state that the function and its arguments name."""
        holder: Any = nn.Module()
        holder.function, holder.rest = self._function, self.rest
        return Snapshot(holder)


class StepLoss(nn.Module):
    """The loss of a step function as a function of its batch; its models are children."""

    def __init__(
        self,
        function: Callable[..., Any],
        place: ArgumentPlace,
        dim: int,
        models: Iterable[nn.Module],
    ) -> None:
        """``place``: of the batch among the arguments; ``dim``: the dimension of its samples."""
        super().__init__()
        self.models = nn.ModuleList(models)
        self._call = _Call(function, place)
        self._dim = dim
        self._watch = ModuleWatch(weakref.ref(self))
        self._layouts = Layouts(lambda: self, self._find, Known(), self._watch)

    def forward(self, value: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        return self._call.loss(value)

    def weights(self, value: Any, rest: Arguments) -> Weights:
        """Return the weights of the samples in the loss of the batch ``value``.

        ``rest``: the other arguments. Raises ``Refused`` if the losses of parts do not add up. The
        function runs on a few samples; what it changes outside of its models is put back.
        """
        batch = Batch.of((value,), {})
        self._call.rest = rest
        self._watch.look()
        try:
            layout = self._layouts.of(batch)
        finally:
            self._call.rest = ((), {})
        (join,) = layout.joins
        return layout.weights(join, batch)

    def _find(self, batch: Batch, gradients: bool) -> Layout:
        before = self._call.state()
        try:
            return find_layout(self, self, batch, gradients=gradients, dims=(self._dim,))
        finally:
            before.restore()
