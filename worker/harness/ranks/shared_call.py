"""One call of a module, divided among the ranks; the script sees a call of the whole batch.

All ranks have the same arguments. A rank runs its slice of the batch and gets the joined
outputs of all slices, by the layout that ``split_check`` has verified. The backward pass runs the
slice's own graph and sums the gradients over the ranks. It returns the whole gradients to autograd,
so ``.grad`` never holds those of a slice. A term that the script adds to its loss counts once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from autofit.exceptions import AutofitError, Refused
from autofit.strategies import RANKS, SPLIT
from autofit.strategies.base import Deferred, Forward, Undo
from autofit.worker.harness.batch.late_output import LateOutput
from autofit.worker.harness.batch.layout import Batch, Cut, Layout, joined
from autofit.worker.harness.batch.outputs import Gradients, Parts
from autofit.worker.harness.patching.observers import Seams, inside, plain_backward
from autofit.worker.harness.ranks.batch_norm import SharedStatistics
from autofit.worker.harness.ranks.group import RankGroup
from autofit.worker.harness.ranks.lockstep import (
    LabelCheck,
    own_draws,
)
from autofit.worker.harness.ranks.reduction import Reductions
from autofit.worker.harness.torch_state.graph import differentiated, nodes_made
from autofit.worker.harness.torch_state.modules import without_hooks_of_script
from autofit.worker.harness.torch_state.pytree import flatten
from autofit.worker.harness.torch_state.rng import RandomState
from autofit.worker.harness.torch_state.undo import temporarily
from autofit.worker.harness.verification.layout_cache import plain_layout
from autofit.worker.harness.verification.split_check import batched_arguments
from autofit.worker.harness.verification.splits import Splits
from autofit.worker.oom.attempt import free_frames
from autofit.worker.oom.classifier import ErrorKind, classify

CREATE_GRAPH = "the script differentiates gradients (create_graph) through the model"
UNKNOWN_LEAF = "the model uses a tensor with gradients that is not one of its parameters"
UNKNOWN_GRAPH = "its autograd graph differs from those that were verified"
TWICE = "Trying to backward through the graph a second time, without retain_graph=True before"


class Sharded(Protocol):
    """Runs the calls of a root whose weights are sharded (``sharded_weights.ShardedWeights``)."""

    def call(
        self,
        shared: DividedCalls,
        run: Forward,
        batch: Batch,
        layout: Layout | None,
        *,
        compared: bool,
    ) -> Any:
        """Run a training call, divided by ``layout`` or whole on every rank."""

    def abandon_call(self) -> None:
        """Forget a forward whose call runs again."""

    def evaluate(self, run: Forward, args: Any, kwargs: Any) -> Any:
        """Run a call without gradients."""


class DividedCalls:
    """Divides the calls of one module among the ranks of ``group``."""

    def __init__(
        self,
        splits: Splits,
        seams: Seams,
        group: RankGroup,
        statistics: SharedStatistics | None,
        *,
        strict: bool = False,
    ) -> None:
        """``statistics``: those of BatchNorm; ``None`` for a module without one.

        ``strict``: a call that cannot be divided is refused, because the plan is measured.
        """
        self.splits = splits
        self.strict = strict
        self.seams = seams
        self.group = group
        self.labels = LabelCheck(group)
        self.statistics = statistics
        if statistics is not None:
            splits.by_sample = statistics.by_sample
        self.reductions = Reductions(group, apart=statistics is not None)
        self.sharded: Sharded | None = None
        """Runs the calls if the plan shards the weights."""
        self.calls = 0
        """How many calls were divided."""
        self.runs_slice = False
        """A slice runs now, so no rank may decide alone what becomes of the call."""
        self._agreed: tuple[str | None, str] | None = None
        """What all ranks have found last: the layout, or the reason why there is none."""

    @property
    def name(self) -> str:
        """The class of the module."""
        return type(self.splits.root.module).__name__

    def divided(
        self,
        run: Forward,
        batch: Batch,
        layout: Layout | None,
        *,
        compared: bool,
        make: Callable[..., SharedCall] | None = None,
    ) -> tuple[Any] | str:
        """Return the output of a call that is divided by ``layout``, in a tuple.

        Returns the reason if the call must run whole, empty if there is nothing to divide; then
        nothing of it is left. If the shape of its graph was not verified, because a term has joined
        the loss for example, it is verified and the slices run again. ``compared``: the ranks
        compare what they find in the call. ``make``: returns the call, by default a ``SharedCall``.
        """
        reason, restore = "", None
        while layout is not None:
            call = (make or SharedCall)(self, run, batch, layout, compared=compared)
            if not call.divides:
                return ""
            again, restore = restore is not None, restore or self._state(layout)
            reason, shape = call.forward()
            if not reason and shape is None:
                return (call.outputs(),)
            restore()
            if self.sharded is not None:
                self.sharded.abandon_call()
            if reason or again or shape is None:
                return reason or UNKNOWN_GRAPH
            find = partial(self.splits.layouts.verify_again, layout, batch, shape)
            layout, reason = self._agreed_on(batch, find)
            compared = True
        return reason

    def layout(self, batch: Batch) -> tuple[Layout | None, str]:
        """Return the layout on which all ranks agree.

        Returns ``None`` with the reason if a rank has found none, and without one if there is
        nothing to divide.
        """
        if self.group.size == 1:  # there is nobody to divide the call with
            return None, ""
        sizes = [batch.leaves[index].shape[0] for index in batched_arguments(batch, 0)[:1]]
        if sizes and sizes[0] < 2:  # no other dimension would be taken for the batch later
            return None, ""
        return self._agreed_on(batch, lambda: self.splits.layout(batch))

    def tell_whole(self, reason: str) -> None:
        """Say that every rank runs a whole batch; raise ``Refused`` if a plan is measured."""
        if self.strict:
            raise Refused(reason, RANKS)
        warnings.warn(f"autofit: every rank runs the whole batch: {reason}", stacklevel=2)

    def _agreed_on(self, batch: Batch, find: Callable[[], Layout]) -> tuple[Layout | None, str]:
        layout, reason = None, ""
        try:
            layout = find()
        except Refused as refusal:
            reason = str(refusal)
        told = str(plain_layout(layout)) if layout is not None else None
        if (told, reason) == self._agreed:  # from equal arguments, all find the same
            return layout, reason
        said = self.group.meet(f"how a call of {self.name} is divided", (told, reason))
        alike = len(set(said)) == 1
        lacking = next((why for each, why in said if each is None), None)
        if lacking is None and not alike:
            raise Refused("the ranks would divide a call differently", RANKS)
        self._agreed = said[0] if alike else None
        return (layout, "") if lacking is None else (None, lacking)

    def _state(self, layout: Layout) -> Undo:
        """Return what puts back the generators, and all that a slice changes in the model."""
        places = [(each, each.read()) for each in layout.updates]
        generators = RandomState.now()
        buffers = self.statistics.saved() if self.statistics is not None else None

        def restore() -> None:
            generators.restore()
            for place, value in places:
                place.write(value)
            if buffers is not None:
                buffers()

        return restore


@dataclass(frozen=True, slots=True)
class _Output:
    """The description of one output of a slice, which a rank sends to the others."""

    shape: torch.Size | None
    """``None`` if it is no tensor."""
    dtype: torch.dtype | None
    differentiable: bool
    value: Any
    """The output itself, if it is no tensor."""

    @classmethod
    def of(cls, output: Any) -> _Output:
        """Describe one output."""
        if isinstance(output, Deferred):
            return cls(output.shape, output.dtype, True, None)  # type: ignore[attr-defined]
        if isinstance(output, torch.Tensor):
            return cls(output.shape, output.dtype, output.requires_grad, None)
        return cls(None, None, False, output)


class SharedCall:
    """One call of a root, divided among ranks: its forward pass and its backward pass."""

    def __init__(
        self, root: DividedCalls, run: Forward, batch: Batch, layout: Layout, *, compared: bool
    ) -> None:
        """``compared``: the ranks compare what they find in this call."""
        self._root = root
        self._compared = compared
        self._run = run
        self._batch = batch
        self._layout = layout
        self._size = layout.size(batch)
        size = root.group.size
        bounds = [self._size * rank // size for rank in range(size + 1)]
        self._cuts: list[Cut] = list(pairwise(bounds))
        self._parts = Parts(layout, self._size)
        tensors = ((i, x) for i, x in enumerate(batch.leaves) if isinstance(x, torch.Tensor))
        self._inputs = [i for i, tensor in tensors if tensor.requires_grad]
        """Positions of the arguments that require gradients."""
        self.parameters: Sequence[nn.Parameter] = root.splits.watch.trained
        self._arguments: list[torch.Tensor] = []
        """This rank's slices of the arguments that require gradients."""
        self._local: list[Any] | None = None
        """The outputs of this rank's slice, with their graph."""
        self._spec: TreeSpec | None = None
        self._said: list[list[_Output]] = []
        """The descriptions of all ranks' outputs."""
        self._tracked: list[int] = []
        """Positions of the outputs that autograd follows."""
        self._outputs: list[Any] = []
        self._late: dict[int, tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {}
        """Outputs to gather when the script uses them: a tensor like them, and how."""

    @property
    def divides(self) -> bool:
        """Whether each rank has samples, and labels that count."""
        scalars = [i for i, join in enumerate(self._layout.joins) if join.scalar]
        filled = all(start < stop for start, stop in self._cuts)
        weigh = self._parts.weight
        return filled and all(weigh(self._batch, i, cut) for i in scalars for cut in self._cuts)

    @property
    def _cut(self) -> Cut:
        return self._cuts[self._root.group.rank]

    def forward(self) -> tuple[str, str | None]:
        """Run this rank's slice.

        Returns why that of a rank failed, empty if none did, and the shape of the graph if it was
        not verified. A slice may lack what its samples refer to, such as pictures in a list of
        their own. The error is raised if forwards communicate or change state, or if plans are
        compared.
        """
        self._root.calls += 1
        own: list[_Output] | str
        shape = None
        try:
            made = nodes_made()
            self._local, self._spec = self._forward()
            own = [_Output.of(each) for each in self._local]
            shape = self._root.splits.layouts.unknown_graph(
                self._layout, self._local, self._all_parameters(), nodes_made() - made
            )
        except Exception as error:
            communicates = self._root.statistics is not None or self._root.sharded is not None
            alone = not (communicates or self._layout.updates)
            plain = classify(error).kind is ErrorKind.NOT_OOM and not isinstance(
                error, AutofitError
            )
            refused = isinstance(error, Refused) and error.strategy == SPLIT
            if self._root.strict or not (alone and (plain or refused)):
                raise
            own = str(error)
            if plain:
                own = f"the model raises {type(error).__name__} for a part of it: {error}"
            free_frames(error)
        said = self._root.group.meet(f"a call of {self._root.name}", (own, shape))
        self._said = [each for each, _ in said if isinstance(each, list)]
        failed = next((each for each, _ in said if isinstance(each, str)), "")
        return failed, next((each for _, each in said if each is not None), None)

    def outputs(self) -> Any:
        """Return the outputs of the whole batch."""
        assert self._local is not None, "the slice has run"
        assert self._spec is not None, "the slice has run"
        self._outputs = self._joined(self._local, self._said)
        outputs = self._outputs
        if self._tracked:
            inputs = [self._batch.leaves[i] for i in self._inputs]
            tracked = _Bridge.apply(self, *self.parameters, *inputs)  # type: ignore[no-untyped-call]
            for index, tensor in zip(self._tracked, tracked, strict=True):
                outputs[index] = tensor
        for index, (like, gather) in self._late.items():
            outputs[index] = LateOutput.of(outputs[index], like, gather)
        self._outputs, self._late = [], {}
        return tree_unflatten(outputs, self._spec)

    def tracked_outputs(self) -> tuple[torch.Tensor, ...]:
        """Return the joined outputs that autograd follows."""
        return tuple(self._outputs[index] for index in self._tracked)

    def _forward(self) -> tuple[list[Any], TreeSpec]:
        leaves = self._layout.select(self._batch, self._cut)
        for index in self._inputs:
            leaves[index] = leaves[index].detach().requires_grad_()
        self._arguments = [leaves[index] for index in self._inputs]
        args, kwargs = self._batch.call(leaves)
        draws = own_draws(self._root.group) if self._layout.draws else nullcontext()
        with temporarily(self._root, "runs_slice", True), self._together(), draws:
            output = self._run(*args, **kwargs)
        outputs, spec = flatten(output)
        if self._compared:
            refuse_unknown_tensors(outputs, (*self._trained(), *self._arguments))
        return outputs, spec

    def _all_parameters(self) -> Iterator[torch.Tensor]:
        """Yield all parameters of the model, as its forward sees them; few calls read them."""
        yield from self._root.splits.root.module.parameters()

    def _trained(self) -> Iterable[torch.Tensor]:
        """Return the tensors that get gradients in the model, as its forward sees them."""
        return self.parameters

    def _together(self) -> AbstractContextManager[None]:
        """Return a context in which BatchNorm uses the samples of all ranks.

        Backward needs it too, where it repeats a forward.
        """
        statistics = self._root.statistics
        return statistics.together() if statistics is not None else nullcontext()

    def _joined(self, local: list[Any], said: Sequence[list[_Output]]) -> list[Any]:
        """Return the outputs of the whole batch, without a graph.

        If the model returns its loss, no entries of the other outputs are gathered yet.
        """
        group = self._root.group
        if any(len(each) != len(self._layout.joins) for each in said):
            raise Refused("the structure of the model's output differs for a part of the batch")
        self._tracked = [
            i
            for i, column in enumerate(zip(*said, strict=True))
            if any(c.differentiable for c in column)
        ]
        has_loss = any(self._layout.joins[i].scalar for i in self._tracked)
        outputs = []
        for index, (each, join) in enumerate(zip(local, self._layout.joins, strict=True)):
            told: list[_Output] = [row[index] for row in said]
            if has_loss and join.rows and isinstance(each, (torch.Tensor, Deferred)):
                outputs.append(self._gathered_later(index, each, told))
                continue
            column: Sequence[Any] = [row.value for row in told]
            if isinstance(each, Deferred):
                each = local[index] = each.value()
            if isinstance(each, torch.Tensor):
                shapes = [row.shape for row in told if row.shape is not None]
                column = group.gather(each.detach(), shapes)
            weigh = self._parts.weight
            weights = [weigh(self._batch, index, cut) for cut in self._cuts] if join.scalar else []
            outputs.append(joined(join, column, self._cuts, weights))
        return outputs

    def _gathered_later(
        self, index: int, own: torch.Tensor | Deferred, told: Sequence[_Output]
    ) -> torch.Tensor:
        """Return a tensor without memory that stands in for an output of the whole batch."""
        outlines = [torch.empty(each.shape, dtype=each.dtype, device="meta") for each in told]  # type: ignore[arg-type]
        like = joined(self._layout.joins[index], outlines, self._cuts, [])
        what = f"the use of output {index} of call {self._root.calls} of {self._root.name}"
        if not isinstance(own, LateOutput):
            own = own.detached() if isinstance(own, Deferred) else own.detach()
        shapes = [each.shape for each in outlines]
        self._late[index] = like, partial(self._gather, index, own, shapes, what)
        stand_in = torch.empty((), dtype=like.dtype, device=own.device)  # type: ignore[union-attr]
        return stand_in.expand(like.shape)

    def _gather(
        self, index: int, own: torch.Tensor | Deferred, shapes: Sequence[torch.Size], what: str
    ) -> torch.Tensor:
        """Return an output of the whole batch."""
        tensor = own.value().detach() if isinstance(own, Deferred | LateOutput) else own
        group = self._root.group
        group.meet(what)
        column = group.gather(tensor, shapes)
        found: torch.Tensor = joined(self._layout.joins[index], column, self._cuts, [])
        return found

    # --- backward --------------------------------------------------------------------------

    def backward(self, cotangents: Sequence[torch.Tensor | None]) -> Gradients:
        """Return the whole batch's gradients of the parameters and of the arguments."""
        local = self._local
        if local is None:
            raise RuntimeError(TWICE)
        reduction = self._root.reductions.of(self.parameters, learns=self._compared)
        self._root.labels(cotangents, reduction.planned, due=self._compared)
        incoming = dict(zip(self._tracked, cotangents, strict=True))
        shares = self._parts.shares(self._batch, incoming, self._cut)
        for i in shares:
            if isinstance(local[i], Deferred):
                local[i] = local[i].value()
            elif isinstance(local[i], LateOutput):
                local[i] = local[i].in_graph()
        wanted = [
            i for i in shares if isinstance(local[i], torch.Tensor) and local[i].requires_grad
        ]
        keeps = self._root.seams.keeps_graph
        if not keeps:
            self._local = None
        outputs, received = [local[i] for i in wanted], [shares[i] for i in wanted]
        targets = [*self.parameters, *self._arguments]
        hidden = without_hooks_of_script(self.parameters)
        with inside(self._root.seams), self._together(), hidden, _without_gradients(targets):
            if outputs and targets:
                # A call in chunks adds several times; only the last sum is complete.
                chunks = self._root.splits.chunked is not None
                with nullcontext() if chunks else reduction.during():
                    plain_backward(outputs, received, retain_graph=keeps)
            found = [(self._cut, [each.grad for each in self._arguments])]
            return reduction.finish(self._parts.join_arguments(self._batch, self._inputs, found))


@contextmanager
def _without_gradients(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let ``.grad`` of all tensors be empty within this context; put them back after it."""
    before = [(each, each.grad) for each in tensors]
    for each, _ in before:
        each.grad = None
    try:
        yield
    finally:
        for each, gradient in before:
            each.grad = gradient


def refuse_unknown_tensors(outputs: Iterable[Any], known: Iterable[torch.Tensor]) -> None:
    """Raise ``Refused`` if a tensor that is not ``known`` would get a part of its gradient."""
    names = {id(each) for each in known}
    if any(each.numel() and id(each) not in names for each in differentiated(outputs)):
        raise Refused(UNKNOWN_LEAF, RANKS)


class _Bridge(torch.autograd.Function):
    """The autograd node that represents a divided call in the script's graph."""

    @staticmethod
    def forward(ctx: Any, call: SharedCall, *tracked: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the joined outputs. ``tracked``: the parameters and arguments with gradients."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.tracked_outputs()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of the parameters and of the arguments."""
        if torch.is_grad_enabled():
            raise Refused(CREATE_GRAPH, RANKS)
        return (None, *ctx.call.backward(cotangents))
