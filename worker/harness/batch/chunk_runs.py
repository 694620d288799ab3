"""The chunks of one call: they run, and run again in backward, which adds their gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import TreeSpec

from autofit.exceptions import Refused
from autofit.strategies import SPLIT
from autofit.strategies.base import Forward
from autofit.worker.harness.batch.call_state import CallState
from autofit.worker.harness.batch.late_output import CHANGED as CHANGED_BEFORE_USE
from autofit.worker.harness.batch.layout import Batch, Cut, Layout, cuts
from autofit.worker.harness.batch.outputs import Gradients, Parts
from autofit.worker.harness.patching.observers import Seams, inside, plain_backward, plain_grad
from autofit.worker.harness.torch_state.host_saved import copy_on_host, saved_on_host
from autofit.worker.harness.torch_state.module_state import Attributes
from autofit.worker.harness.torch_state.modules import version_of
from autofit.worker.harness.torch_state.pytree import flatten
from autofit.worker.harness.torch_state.rng import Ambient, RandomState
from autofit.worker.harness.torch_state.undo import temporarily
from autofit.worker.oom.attempt import free_frames

CHANGED = "the model's weights, buffers or mode changed between its forward and its backward"


class Owner(Protocol):
    """What a call needs of the root it belongs to (``chunked_root.ChunkedRoot``)."""

    state: CallState
    seams: Seams
    own: list[nn.Parameter]
    """All parameters of the root."""
    parameters: list[nn.Parameter]
    """The parameters that required gradients at the root's last call."""
    micro_batch: int

    def cut(self, size: int, eager: bool) -> list[Cut]:
        """Return the chunks of a call; ``eager``: no chunk runs again in backward."""

    def shrink(self, error: BaseException, phase: str, size: int) -> bool:
        """Reduce ``micro_batch`` after memory ran out in a chunk of ``size`` samples.

        Returns whether to try again. Raises ``error`` again if it is no shortage of memory.
        """

    def backward_done(self) -> None:
        """Notice that the backward of a call has ended."""

    @property
    def attributes(self) -> Attributes:
        """The plain attributes of the root's module at the start of its call."""

    def unknown_graph(self, layout: Layout, outputs: Sequence[Any], nodes: int) -> str | None:
        """Return the shape of a chunk's autograd graph; ``None`` if it was verified.

        ``nodes``: how many nodes the chunk has made.
        """

    def live_module(self) -> nn.Module:
        """Return the root's module, which must still exist."""

    def state_version(self) -> object:
        """Return a value that changes with the root's mode, weights or buffers."""


@dataclass
class ChunkGraph:
    """A chunk whose autograd graph still exists."""

    cut: Cut
    leaves: list[Any]
    outputs: list[Any]


class ChunkRuns:
    """Runs the chunks of one call, and runs them again in backward."""

    def __init__(self, owner: Owner, forward: Forward, batch: Batch, layout: Layout) -> None:
        self.owner = owner
        self.forward = forward
        self.batch = batch
        """The arguments; their tensors are removed between forward and backward."""
        self.layout = layout
        self.parameters = owner.parameters
        """The parameters that required gradients in forward."""
        self.size = layout.size(batch)
        tensors = ((i, x) for i, x in enumerate(batch.leaves) if isinstance(x, torch.Tensor))
        self.inputs = [index for index, tensor in tensors if tensor.requires_grad]
        """Positions of the arguments that require gradients, such as another root's output."""
        self.parts = Parts(layout, self.size)
        self.spec: TreeSpec | None = None
        """The structure of the root's output."""
        self.ambient = Ambient.now()
        self.attributes = owner.attributes
        """The plain attributes at the start of forward; recomputation in backward restores them."""
        self.cuts: list[Cut] = []
        self.states: list[RandomState] = []
        """The state of the random generators at the start of each chunk."""
        self.drew = False
        """The forward drew random numbers."""
        self.state_version: object = None
        """The owner's ``state_version`` after forward."""
        self.graph: ChunkGraph | None = None
        self._root = owner.live_module()

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the arguments."""
        return [leaf for leaf in self.batch.leaves if isinstance(leaf, torch.Tensor)]

    def drop_arguments(self) -> None:
        """Drop the arguments; autograd has saved them and frees them after backward."""
        leaves = [_ABSENT if isinstance(leaf, torch.Tensor) else leaf for leaf in self.batch.leaves]
        self.batch = Batch(leaves, self.batch.spec)

    def restore_arguments(self, saved: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Have the arguments again; ``saved`` returns their tensors."""
        if any(leaf is _ABSENT for leaf in self.batch.leaves):
            tensors = iter(saved())
            leaves = [next(tensors) if leaf is _ABSENT else leaf for leaf in self.batch.leaves]
            self.batch = Batch(leaves, self.batch.spec)

    def random_state(self) -> RandomState:
        """Save all generators' state; only torch's if the root is known to use no others."""
        return RandomState.now(
            elsewhere=self.layout.draws and self.owner.state.draws_elsewhere is not False
        )

    def run(self, cut: Cut, *, apart: bool = True) -> tuple[list[Any], list[Any]]:
        """Run the root on the samples of ``cut``; return its flattened arguments and outputs.

        ``apart``: the graph ends at the arguments.
        """
        if torch.is_grad_enabled():
            torch.clear_autocast_cache()  # casts cached without a graph would detach the weights
        leaves = self.layout.select(self.batch, cut)
        for index in self.inputs if apart else ():
            leaves[index] = leaves[index].detach().requires_grad_()
        args, kwargs = self.batch.call(leaves)
        outputs, self.spec = flatten(self.forward(*args, **kwargs))
        return leaves, outputs

    def rows_again(
        self, arguments: Sequence[Any], wanted: Collection[int]
    ) -> dict[int, list[torch.Tensor]]:
        """Run the chunks again without a graph; return rows of the outputs ``wanted``, on the host.

        Raises ``Refused`` if the model has changed.
        """
        if self.owner.state_version() != self.state_version:
            raise Refused(CHANGED_BEFORE_USE, SPLIT)
        found: dict[int, list[torch.Tensor]] = {index: [] for index in wanted}
        before, batch = self.random_state(), Batch([*arguments], self.batch.spec)
        try:
            with (
                temporarily(self, "batch", batch),
                inside(self.owner.seams),
                torch.inference_mode(False),
                torch.no_grad(),
            ):
                for cut, state in zip(self.cuts, self.states, strict=True):
                    if self.drew:
                        state.restore()
                    with self.ambient.again(), self.attributes.again():
                        outputs = self.run(cut)[1]
                    for index in wanted:
                        found[index].append(copy_on_host(outputs[index]))
                    del outputs
        finally:
            torch.clear_autocast_cache()  # casts cached without a graph would detach the weights
            if self.drew:
                before.restore()
        return found

    def run_again(
        self,
        incoming: dict[int, torch.Tensor | None],
        parameters: list[nn.Parameter] | None,
    ) -> list[tuple[Cut, Gradients]]:
        """Add the gradients of all samples to ``parameters`` (``None``: every leaf).

        ``incoming``: the gradients of outputs, by their positions. Returns those of the arguments,
        for each part of the batch that ran at once.
        """
        found: list[tuple[Cut, Gradients]] = []
        before = self.random_state()
        with inside(self.owner.seams), torch.enable_grad():
            for cut, state in self._chunks_backwards():
                found += self.accumulate(cut, incoming, parameters, state)
        if self.drew:
            before.restore()
        return found

    def differentiable(
        self,
        incoming: dict[int, torch.Tensor | None],
        saved: Callable[[], Sequence[torch.Tensor]],
    ) -> Gradients:
        """Return the gradients of the arguments, with a graph (``create_graph``).

        The graphs of all chunks exist together, as that of the whole batch does in plain PyTorch.
        """
        total: Gradients = [None] * len(self.inputs)
        self.restore_arguments(saved)
        arguments = [self.batch.leaves[index] for index in self.inputs]
        before = self.random_state()
        try:
            with inside(self.owner.seams):
                for cut, state in zip(self.cuts, self.states, strict=True):
                    outputs = self._again(cut, state if self.drew else None, apart=False)[1]
                    shares = self.parts.shares(self.batch, incoming, cut)
                    wanted = [index for index in shares if needs_gradient(outputs[index])]
                    if not wanted:
                        continue
                    found = plain_grad(
                        [outputs[index] for index in wanted],
                        arguments,
                        [shares[index] for index in wanted],
                        create_graph=True,
                        allow_unused=True,
                    )
                    total = [*map(sum_of, total, found)]
        finally:
            self.drop_arguments()
            if self.drew:
                before.restore()
        return total

    def finish(
        self,
        incoming: dict[int, torch.Tensor],
        parameters: Sequence[nn.Parameter],
        state: RandomState,
        ambient: Ambient,
    ) -> None:
        """Accumulate into ``parameters`` for a forward that ran whole and whose graph was freed."""
        self.ambient, self.state_version, self.drew = (
            ambient,
            self.owner.state_version(),
            self.layout.draws,
        )
        self.cuts, self.states = [(0, self.size)], [state]
        with inside(self.owner.seams), torch.enable_grad():
            for cut, drawn in self._chunks_backwards():
                self.accumulate(cut, dict(incoming), parameters, drawn)

    def _chunks_backwards(self) -> Iterator[tuple[Cut, RandomState | None]]:
        """Yield the chunks, last one first; smaller ones if memory has run out meanwhile.

        Chunks that drew random numbers keep their size: smaller ones would draw other numbers.
        """
        for cut, state in zip(self.cuts[::-1], self.states[::-1], strict=True):
            if self.drew or self._has_graph(cut):
                yield cut, state if self.drew else None
            else:
                yield from ((piece, None) for piece in cuts(*cut, self.owner.micro_batch)[::-1])

    def _has_graph(self, cut: Cut) -> bool:
        return self.graph is not None and self.graph.cut == cut

    def accumulate(
        self,
        cut: Cut,
        incoming: dict[int, torch.Tensor | None],
        parameters: Sequence[nn.Parameter] | None,
        state: RandomState | None,
    ) -> list[tuple[Cut, Gradients]]:
        """Add the gradient of the samples in ``cut`` to ``parameters`` (``None``: every leaf).

        If memory runs out, smaller pieces run for the parameters that have not received it yet.
        Samples that drew random numbers run once more in one piece, with the same draws and with
        autograd's saved tensors in host memory.
        """
        self.owner.state.begin_chunk(self.parameters)
        size = cut[1] - cut[0]
        versions = _versions(self.parameters)
        on_host = self.drew and size > self.owner.micro_batch and not self._has_graph(cut)
        found, error = self._try(cut, incoming, parameters, state, on_host)
        if error is None:
            return [(cut, found)]
        if _versions(self.parameters) != versions:  # some parameters have stepped already
            raise error
        candidates = self.parameters if parameters is None else parameters
        missing = self.owner.state.missing(candidates)
        smaller = self.owner.shrink(error, "backward", size)
        self.graph = None
        free_frames(error)
        if not smaller or on_host:
            raise error
        if self.drew or size == 1:
            found, error = self._try(cut, incoming, missing, state, on_host=True)
            if error is not None:
                raise error
            return [(cut, found)]
        return [
            pair
            for half in cuts(*cut, self.owner.micro_batch)[::-1]
            for piece in cuts(*half, self.owner.micro_batch)[::-1]  # may be smaller by then
            for pair in self.accumulate(piece, incoming, missing, None)
        ]

    def _try(
        self,
        cut: Cut,
        incoming: dict[int, torch.Tensor | None],
        parameters: Sequence[nn.Parameter] | None,
        state: RandomState | None,
        on_host: bool,
    ) -> tuple[Gradients, Exception | None]:
        try:
            with saved_on_host(self.owner.own) if on_host else nullcontext():
                leaves, outputs = self._graph_of(cut, state)
            shares = self.parts.shares(self.batch, incoming, cut)
            wanted = [index for index in shares if needs_gradient(outputs[index])]
            arguments = [leaves[index] for index in self.inputs]
            leaf = None if parameters is None else [*parameters, *arguments]
            if wanted and leaf != []:
                with self.owner.seams.part_of_backward(more=cut[0] > 0):  # first samples come last
                    plain_backward(
                        [outputs[i] for i in wanted], [shares[i] for i in wanted], inputs=leaf
                    )
            return [argument.grad for argument in arguments], None
        except Exception as error:  # noqa: BLE001 - the owner raises it again unless it is an OOM
            return [], error

    def _graph_of(self, cut: Cut, state: RandomState | None) -> tuple[list[Any], list[Any]]:
        graph, self.graph = self.graph, None
        if graph is not None and graph.cut == cut:
            return graph.leaves, graph.outputs
        return self._again(cut, state)

    def _again(
        self, cut: Cut, state: RandomState | None, *, apart: bool = True
    ) -> tuple[list[Any], list[Any]]:
        """Repeat the forward of ``cut`` with a graph; ``apart`` as in ``run``."""
        if self.owner.state_version() != self.state_version:
            raise Refused(CHANGED, SPLIT)
        if state is not None:
            state.restore()
        with self.ambient.again(), self.attributes.again():
            return self.run(cut, apart=apart)


_ABSENT = object()
"""Replaces an argument tensor that autograd has saved."""


def sum_of(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two gradients; ``None`` counts as zero."""
    return other if one is None else one if other is None else one + other


def needs_gradient(output: Any) -> bool:
    """Return whether autograd follows an output."""
    return isinstance(output, torch.Tensor) and output.requires_grad


def _versions(parameters: Sequence[nn.Parameter]) -> int:
    return sum(map(version_of, parameters))
