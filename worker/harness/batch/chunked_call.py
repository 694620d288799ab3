"""One call of a root in chunks: an autograd function whose backward runs the chunks' backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from autofit.exceptions import Refused
from autofit.strategies import SPLIT
from autofit.strategies.base import Forward
from autofit.worker.harness.batch.call_state import CallState, Rows, equal_factors, equal_kind
from autofit.worker.harness.batch.early_gradients import EarlyGradients
from autofit.worker.harness.batch.late_output import CHANGED as CHANGED_BEFORE_USE
from autofit.worker.harness.batch.late_output import LateOutput
from autofit.worker.harness.batch.late_rows import LateRows, is_large, outline, stand_in
from autofit.worker.harness.batch.layout import Batch, Cut, Layout, cuts
from autofit.worker.harness.batch.outputs import Gradients, Parts, multiply, without_graph
from autofit.worker.harness.patching.gradient_reads import Marks, gradient_of, marks
from autofit.worker.harness.patching.observers import Seams, inside, plain_backward, plain_grad
from autofit.worker.harness.torch_state.graph import nodes_made
from autofit.worker.harness.torch_state.host_saved import copy_on_host, saved_on_host
from autofit.worker.harness.torch_state.module_state import Attributes, FirstCallUpdates
from autofit.worker.harness.torch_state.modules import version_of
from autofit.worker.harness.torch_state.pytree import flatten
from autofit.worker.harness.torch_state.rng import Ambient, RandomState
from autofit.worker.oom.attempt import free_frames, is_shortage

CREATE_GRAPH = "the script differentiates the gradients of the model's parameters (create_graph)"
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


class ChunkedFunction(torch.autograd.Function):
    """The autograd node that represents a chunked root in the script's graph."""

    @staticmethod
    def forward(ctx: Any, call: ChunkedCall, *tracked: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the chunks. ``tracked``: the anchor, then the arguments that require gradients."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Autograd frees saved tensors after backward, and detects changes in place until then.
        ctx.save_for_backward(*call.tensors())
        return call.run()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        """Accumulate into the parameters' ``.grad``; return the arguments' gradients."""
        if torch.is_grad_enabled():
            found = ctx.call.differentiable_gradients(cotangents, lambda: ctx.saved_tensors)
            return (None, None, *found)
        owner = ctx.call.owner
        ctx.call.unit = owner.seams.unit_node is ctx
        gradients = ctx.call.backward(cotangents, lambda: ctx.saved_tensors)
        owner.backward_done()
        return (None, None, *gradients)


@dataclass
class ChunkGraph:
    """A chunk whose autograd graph still exists."""

    cut: Cut
    leaves: list[Any]
    outputs: list[Any]


class ChunkedCall:
    """One call of a root in chunks, from its forward to its backward."""

    def __init__(
        self,
        owner: Owner,
        forward: Forward,
        batch: Batch,
        layout: Layout,
        *,
        first_output: int = 0,
    ) -> None:
        """``first_output``: the position of the root's first output; a loss may precede it."""
        self.owner = owner
        self._first_output = first_output
        self._recognized = False
        """The shape of this call's autograd graph was compared with the verified ones."""
        self.forward = forward
        self.batch = batch
        """The arguments; their tensors are removed between forward and backward."""
        self.layout = layout
        self.parameters = owner.parameters
        """The parameters that required gradients in forward."""
        self._size = layout.size(batch)
        tensors = ((i, x) for i, x in enumerate(batch.leaves) if isinstance(x, torch.Tensor))
        self.inputs = [index for index, tensor in tensors if tensor.requires_grad]
        """Positions of the arguments that require gradients, such as another root's output."""
        self._ambient = Ambient.now()
        self._root = owner.live_module()
        self._attributes = owner.attributes
        """The plain attributes at the start of forward; recomputation in backward restores them."""
        self._state_version: object = None
        """The owner's ``state_version`` after forward."""
        # A view, not a leaf: autograd tells only of such nodes whether a backward visits them.
        self.anchor = torch.empty(0, requires_grad=True).view(0)
        self._parts = Parts(layout, self._size)
        self._cuts: list[Cut] = []
        self._states: list[RandomState] = []
        """The state of the random generators at the start of each chunk."""
        self._drew = False
        """The forward drew random numbers."""
        self._graph: ChunkGraph | None = None
        self._gradients: Gradients | None = None
        """The parameters' gradients from eager backward."""
        self.unit = False
        """The script's backward begins at this call, so its loss has the gradient one."""
        self._factor: torch.Tensor | None = None
        """The loss scale that ``_gradients`` already contain."""
        self._adds = False
        """The chunks add to ``.grad``, which holds gradients already (``early_gradients``)."""
        self._added: list[Cut] = []
        """The chunks that have."""
        self._early: EarlyGradients | None = None
        """What they have added, until the script's backward."""
        self._stop_listening: Callable[[], None] = lambda: None
        self._found: Marks = []
        """The gradients that were there, if the next such call may add to them."""
        self._released = False
        """A later call has freed ``_gradients``."""
        self._late: dict[int, torch.device] = {}
        """The devices of the large outputs beside the loss, which are not kept, by position."""
        self._outlines: dict[int, torch.Tensor] = {}
        """Meta tensors like those outputs."""
        self._hosted: dict[int, list[torch.Tensor]] = {}
        """Their rows in host memory, if they are kept there."""
        self._late_rows: weakref.ref[LateRows] | None = None
        self._outputs: list[Any] = []
        self._spec: TreeSpec | None = None
        self._tracked: list[int] = []
        """Positions of the outputs that autograd follows."""

    def __call__(self) -> Any:
        """Run the chunks; return the root's output with its original structure."""
        arguments = self.batch.leaves
        tracked = ChunkedFunction.apply(  # type: ignore[no-untyped-call]
            self, self.anchor, *(self.batch.leaves[i] for i in self.inputs)
        )
        outputs, self._outputs = self._outputs, []
        self._drop_arguments()
        for index, tensor in zip(self._tracked, tracked, strict=True):
            outputs[index] = tensor
        for index, late in self._late_outputs(arguments, outputs).items():
            outputs[index] = late
        assert self._spec is not None
        return tree_unflatten(outputs, self._spec)

    def _late_outputs(self, arguments: list[Any], outputs: list[Any]) -> dict[int, LateOutput]:
        """Return what the script gets in the place of outputs that are not kept."""
        if not self._outlines:
            return {}
        state, hosted, self._hosted = self.owner.state, self._hosted, {}
        rows = LateRows(self.rows_again, state, self.layout, self._cuts, arguments)
        self._late_rows = weakref.ref(rows)
        self.owner.seams.delayed_calls.add(rows)
        return rows.outputs(self._outlines, outputs, hosted)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the arguments."""
        return [leaf for leaf in self.batch.leaves if isinstance(leaf, torch.Tensor)]

    def _drop_arguments(self) -> None:
        """Drop the arguments; autograd has saved them and frees them after backward."""
        leaves = [_ABSENT if isinstance(leaf, torch.Tensor) else leaf for leaf in self.batch.leaves]
        self.batch = Batch(leaves, self.batch.spec)

    def _restore_arguments(self, saved: Callable[[], Sequence[torch.Tensor]]) -> None:
        if any(leaf is _ABSENT for leaf in self.batch.leaves):
            tensors = iter(saved())
            leaves = [next(tensors) if leaf is _ABSENT else leaf for leaf in self.batch.leaves]
            self.batch = Batch(leaves, self.batch.spec)

    # --- forward ---------------------------------------------------------------------------

    def run(self) -> tuple[torch.Tensor, ...]:
        """Run the chunks, smaller ones if memory runs out; return the outputs with a gradient."""
        self.owner.state.begin_forward(self)
        start = self._random_state()
        self._adds = self.owner.state.factor is not None and self._could_add()
        eager = self._adds or self._can_be_eager()
        while (error := self._attempt(eager)) is not None:
            size = max(stop - start for start, stop in self._cuts)
            if self._adds:
                self._drop_attempt(error)
                self._subtract_attempt()
                eager = False
            elif eager:
                self._empty_gradients()
            if isinstance(error, _UnknownScale):
                eager, again = False, True
            elif isinstance(error, UnknownGraph):
                again = False
            elif is_shortage(error) and self.owner.state.rows_short():
                again = True
            else:
                again = self.owner.shrink(error, "forward", size) and size > 1
            self._drop_attempt(error)
            if isinstance(error, UnknownGraph):
                start.restore()
                self._attributes.restore()
                if isinstance(self.forward, FirstCallUpdates):
                    self.forward.restore()
            if not again:
                raise error
            start.restore()
        end = self._random_state()
        self._drew = start != end
        if self.layout.draws and self.owner.state.draws_elsewhere is None:
            self.owner.state.draws_elsewhere = start.elsewhere != end.elsewhere
        self._state_version = self.owner.state_version()
        if self._adds:
            self._wait_with_early_gradients()
        elif not eager and self._could_add():
            self._found = marks(self.parameters)
        self._outlines = {index: self._outputs[index] for index in self._late}
        for index, like in self._outlines.items():
            self._outputs[index] = stand_in(like, self._late[index])
        return tuple(self._outputs[index] for index in self._tracked)

    def _random_state(self) -> RandomState:
        """Save all generators' state; only torch's if the root is known to use no others."""
        return RandomState.now(
            elsewhere=self.layout.draws and self.owner.state.draws_elsewhere is not False
        )

    def _attempt(self, eager: bool) -> Exception | None:
        self._cuts = self.owner.cut(self._size, eager)
        self._states = []
        self._late, self._hosted = {}, {}
        self._added = []
        try:
            with inside(self.owner.seams):
                parts = [self._parts.collect(cut, self._chunk(cut, eager)) for cut in self._cuts]
                if eager and not self._adds:
                    self._gradients = [*map(gradient_of, self.parameters)]
                    self._empty_gradients()
                self._outputs = self._parts.join(self.batch, self._cuts, parts)
        except Exception as error:  # noqa: BLE001 - the owner raises it again unless it is an OOM
            return error
        return None

    def _chunk(self, cut: Cut, eager: bool) -> list[Any]:
        self._states.append(self._random_state())
        # Without gradients of earlier calls there is nothing to note.
        self.owner.state.begin_chunk(self.parameters if self._adds else ())
        graph = eager or cut == self._cuts[-1]
        made = nodes_made()
        with torch.set_grad_enabled(graph):
            leaves, outputs = self._forward(cut)
        if graph:
            self._tracked = [i for i, out in enumerate(outputs) if _needs_gradient(out)]
            self._recognize(outputs, nodes_made() - made)
            if not eager:
                self._graph = ChunkGraph(cut, leaves, list(outputs))
        kept = self._without_late([without_graph(out) for out in outputs], cut)
        if eager:
            (index,) = self._loss_outputs()
            loss = outputs[index]
            outputs.clear()  # backward does not need the others
            self._differentiate(index, loss, cut)
            self._added.append(cut)
        return kept

    def _without_late(self, outputs: list[Any], cut: Cut) -> list[Any]:
        """Replace the large outputs of a chunk by their outlines.

        Their rows are copied to the host if the script may read them.
        """
        joins, kept = self.layout.joins, self.owner.state.rows
        if kept is Rows.ON_DEVICE or len(self._cuts) < 2 or len(outputs) != len(joins):
            return outputs
        if cut == self._cuts[0] and self._loss_outputs():
            times = self._size / (cut[1] - cut[0])
            pairs = enumerate(zip(joins, outputs, strict=True))
            self._late = {i: o.device for i, (j, o) in pairs if j.rows and is_large(o, times)}
        for index in self._late:
            if kept is Rows.ON_HOST:
                self._hosted.setdefault(index, []).append(copy_on_host(outputs[index]))
            outputs[index] = outline(outputs[index])
        return outputs

    def _recognize(self, outputs: list[Any], nodes: int) -> None:
        """Raise ``UnknownGraph`` if the call's first graph has a shape that was not verified."""
        if self._recognized:
            return
        shape = self.owner.unknown_graph(self.layout, outputs[self._first_output :], nodes)
        if shape is not None:
            raise UnknownGraph(shape)
        self._recognized = True

    def _differentiate(self, index: int, loss: torch.Tensor, cut: Cut) -> None:
        """Run an eager chunk's backward; raise ``_UnknownScale`` if it needs a loss scale first.

        ``index``: the position of the loss among the outputs.
        """
        if not loss.requires_grad:  # all its parameters are frozen
            return
        scale, ambient = self.owner.state.loss_scale, self._ambient
        half = scale.matters(ambient)
        if half is None and (half := scale.learn(ambient, loss)):
            raise _UnknownScale
        self._factor = self.owner.state.factor if self._adds else scale.factor if half else None
        if self._adds and (half or not equal_kind(self._factor, loss)):
            raise _UnknownScale
        if weight := self._parts.weight(self.batch, index, cut):
            cotangent = torch.full_like(loss, weight)
            with ambient.off().again():
                plain_backward(
                    loss, cotangent if self._factor is None else cotangent.mul_(self._factor)
                )

    def rows_again(
        self, arguments: Sequence[Any], wanted: Collection[int]
    ) -> dict[int, list[torch.Tensor]]:
        """Run the chunks again without a graph; return rows of the outputs ``wanted``, on the host.

        Raises ``Refused`` if the model has changed.
        """
        if self.owner.state_version() != self._state_version:
            raise Refused(CHANGED_BEFORE_USE, SPLIT)
        found: dict[int, list[torch.Tensor]] = {index: [] for index in wanted}
        present, before = self.batch, self._random_state()
        self.batch = Batch([*arguments], present.spec)
        try:
            with inside(self.owner.seams), torch.inference_mode(False), torch.no_grad():
                for cut, state in zip(self._cuts, self._states, strict=True):
                    if self._drew:
                        state.restore()
                    with self._ambient.again(), self._attributes.again():
                        outputs = self._forward(cut)[1]
                    for index in wanted:
                        found[index].append(copy_on_host(outputs[index]))
                    del outputs
        finally:
            self.batch = present
            torch.clear_autocast_cache()  # casts cached without a graph would detach the weights
            if self._drew:
                before.restore()
        return found

    def _forward(self, cut: Cut, *, apart: bool = True) -> tuple[list[Any], list[Any]]:
        """Run the root on the samples of ``cut``; return its flattened arguments and outputs.

        ``apart``: the graph ends at the arguments.
        """
        if torch.is_grad_enabled():
            torch.clear_autocast_cache()  # casts cached without a graph would detach the weights
        leaves = self.layout.select(self.batch, cut)
        for index in self.inputs if apart else ():
            leaves[index] = leaves[index].detach().requires_grad_()
        args, kwargs = self.batch.call(leaves)
        outputs, self._spec = flatten(self.forward(*args, **kwargs))
        return leaves, outputs

    def _loss_outputs(self) -> list[int]:
        joins = enumerate(self.layout.joins)
        return [i for i, join in joins if join.scalar and not join.detached]

    def _can_be_eager(self) -> bool:
        """Return whether each chunk's backward can run right after its forward.

        It cannot while ``.grad`` holds gradients or another call will add some, because the eager
        gradients would be a second copy. It cannot if parameters step in backward, nor in float16
        before the loss scale is known.
        """
        scale = self.owner.state.loss_scale
        return (
            self._backward_may_follow()
            and not any(each is not None for each in map(gradient_of, self.parameters))
            and (scale.settled or not scale.matters(self._ambient))
        )

    def _backward_may_follow(self) -> bool:
        """Return whether a chunk's loss gives all gradients, whatever ``.grad`` holds."""
        return (
            len(self._loss_outputs()) == 1
            and not self.inputs
            and self.owner.state.one_at_a_time
            and not self.owner.seams.stepping
        )

    def _could_add(self) -> bool:
        """Return whether a call like this may add to ``.grad`` once the script's factor is known.

        Not in float16, where the difference of two factors may underflow.
        """
        return (
            self.owner.state.may_add
            and self.owner.live_module().training
            and self._backward_may_follow()
            and self.owner.state.loss_scale.matters(self._ambient) is not True
            and any(mark is not None for mark in marks(self.parameters))
        )

    # --- early gradients -------------------------------------------------------------------

    def _wait_with_early_gradients(self) -> None:
        """Keep what is needed to take the gradients back, until the script's backward."""
        assert self._factor is not None, "the chunks were differentiated"
        arguments = [without_graph(each) for each in self.batch.leaves]
        self._early = EarlyGradients(self.parameters, self._factor, arguments)
        self.owner.state.adds(self.take_back)
        self.owner.seams.delayed_calls.add(self)
        self._stop_listening = self.owner.seams.gradient_reads.listen(self._read)

    def _read(self, parameter: torch.Tensor) -> None:
        if self._early is not None and self._early.concerns(parameter):
            self.owner.state.take_back()

    def run_before_change(self) -> None:
        """Take early gradients back: the model is about to change."""
        if self._early is not None:
            self.owner.state.take_back()

    def _early_gradients(self) -> EarlyGradients | None:
        early, self._early = self._early, None
        if early is not None:
            self.owner.seams.delayed_calls.discard(self)
            self._stop_listening()
        return early

    def take_back(self) -> None:
        """Subtract what was added; the script's backward, if it comes, adds everything."""
        if (early := self._early_gradients()) is None:
            return
        kept, _ = early.unchanged_and_replaced()
        if not kept:
            return
        (loss,) = self._loss_outputs()
        present, self.batch = self.batch, Batch(early.arguments, self.batch.spec)
        try:
            self._run_again({loss: -early.factor}, kept)
        finally:
            self.batch = present

    def _subtract_attempt(self) -> None:
        """Subtract what the chunks of a failed attempt have added, and add no more."""
        self._adds = False
        factor, state = self.owner.state.factor, self.owner.state
        state.stop_adding()
        (loss,) = self._loss_outputs()
        assert factor is not None, "the chunks have added with a factor"
        self._state_version, self._drew = self.owner.state_version(), self.layout.draws
        before = self._random_state()
        pairs = list(zip(self._cuts, self._states, strict=False))
        some = state.arrived(self.parameters)
        with inside(self.owner.seams), torch.enable_grad():
            for cut, drawn in pairs:
                receivers = None if cut in self._added else some
                if receivers != []:
                    # The attempt has failed, so whether it drew is not known: restore in any case.
                    self._accumulate(cut, {loss: -factor}, receivers, drawn)
        before.restore()

    def release(self) -> None:
        """Free the graph and the gradients: the root is called again before this backward."""
        self._graph = None
        self._released = self._released or self._gradients is not None
        self._gradients = None

    # --- backward --------------------------------------------------------------------------

    def backward(
        self,
        cotangents: Sequence[torch.Tensor | None],
        saved: Callable[[], Sequence[torch.Tensor]],
    ) -> Gradients:
        """Accumulate into ``.grad``; return the gradients of the arguments that require them.

        ``saved`` returns the argument tensors. Autograd raises in it if the script changed one.
        """
        rows = self._late_rows() if self._late_rows is not None else None
        if rows is not None:  # parameters may step in this backward
            rows.run_before_change()
        self.owner.state.begin_backward(self, released=self._released)
        incoming = dict(zip(self._tracked, cotangents, strict=True))
        present = [index for index, cotangent in incoming.items() if cotangent is not None]
        self._learn_factor(incoming, present)
        if self._settle(incoming, present, saved):
            return []
        if present == self._loss_outputs() and self._hand_over_if_scaled(incoming[present[0]]):
            return []
        if self._gradients is not None:  # the script uses more than the loss
            self.owner.state.stop_delaying()
        self._gradients = None
        self._restore_arguments(saved)
        try:
            found = self._run_again(incoming)
            found.sort(key=lambda pair: pair[0])
            return [*self._parts.join_arguments(self.batch, self.inputs, found)]
        finally:
            self._graph = None
            self._drop_arguments()

    def _learn_factor(
        self, incoming: dict[int, torch.Tensor | None], present: Sequence[int]
    ) -> None:
        """Note the factor on a call that found gradients, if the script left these alone since."""
        if not self._found:
            return
        if present == self._loss_outputs() and marks(self.parameters) == self._found:
            factor = incoming[present[0]]
            assert factor is not None
            self.owner.state.factor = factor.detach().clone()
        else:
            self.owner.state.stop_adding()

    def _settle(
        self,
        incoming: dict[int, torch.Tensor | None],
        present: Sequence[int],
        saved: Callable[[], Sequence[torch.Tensor]],
    ) -> bool:
        """Make early gradients what this backward asks for; return whether there were any."""
        if (early := self._early_gradients()) is None:
            return False
        state, (loss,) = self.owner.state, self._loss_outputs()
        state.added()
        kept, lost = early.unchanged_and_replaced()
        came = incoming.get(loss)
        right = present == [loss] and came is not None and equal_factors(early.factor, came)
        if right and not lost:
            return True
        missing = -early.factor if came is None else came - early.factor
        state.another_factor(lost=bool(lost))
        self._restore_arguments(saved)
        try:
            if lost:
                self._run_again(incoming, lost)
            if kept and not right:
                self._run_again({**incoming, loss: missing}, kept)
        finally:
            self._drop_arguments()
        return True

    def _hand_over_if_scaled(self, factor: torch.Tensor | None) -> bool:
        """Move eager gradients into ``.grad`` if they exist and have the right loss scale."""
        assert factor is not None
        scale = self.owner.state.loss_scale
        right = self._factor is None
        if scale.matters(self._ambient):
            right = equal_factors(self._factor, factor)
            scale.note(factor)
        if self._gradients is None or not right:
            return False
        self._hand_over(factor if self._factor is None and not self.unit else None)
        return True

    def differentiable_gradients(
        self,
        cotangents: Sequence[torch.Tensor | None],
        saved: Callable[[], Sequence[torch.Tensor]],
    ) -> Gradients:
        """Return the gradients of the arguments, with a graph (``create_graph``).

        The graphs of all chunks exist together, as that of the whole batch does in plain PyTorch.
        Raises ``Refused`` if the parameters' gradients are to have a graph too.
        """
        if self._receivers() != []:
            raise Refused(CREATE_GRAPH, SPLIT)
        incoming = dict(zip(self._tracked, cotangents, strict=True))
        total: Gradients = [None] * len(self.inputs)
        self._restore_arguments(saved)
        arguments = [self.batch.leaves[index] for index in self.inputs]
        before = self._random_state()
        try:
            with inside(self.owner.seams):
                for cut, state in zip(self._cuts, self._states, strict=True):
                    outputs = self._again(cut, state if self._drew else None, apart=False)[1]
                    shares = self._parts.shares(self.batch, incoming, cut)
                    wanted = [index for index in shares if _needs_gradient(outputs[index])]
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
            self._drop_arguments()
            if self._drew:
                before.restore()
        return total

    @property
    def tracked(self) -> int:
        """The number of outputs that autograd follows."""
        return len(self._tracked)

    def gradients_of(
        self,
        parameters: list[nn.Parameter],
        cotangents: Sequence[torch.Tensor | None],
        saved: Callable[[], Sequence[torch.Tensor]],
    ) -> Gradients:
        """Return the gradients of some ``parameters``; their ``.grad`` stays as it is.

        ``cotangents`` and ``saved`` as for ``backward``, which may follow.
        """
        self.owner.state.take_back()
        held = [*map(gradient_of, parameters)]
        self._restore_arguments(saved)
        try:
            for parameter in parameters:
                parameter.grad = None
            self._run_again(dict(zip(self._tracked, cotangents, strict=True)), parameters)
            return [*map(gradient_of, parameters)]
        finally:
            self._drop_arguments()
            for parameter, gradient in zip(parameters, held, strict=True):
                parameter.grad = gradient

    def _run_again(
        self,
        incoming: dict[int, torch.Tensor | None],
        parameters: list[nn.Parameter] | None = None,
    ) -> list[tuple[Cut, Gradients]]:
        found: list[tuple[Cut, Gradients]] = []
        parameters = self._receivers() if parameters is None else parameters
        before = self._random_state()
        with inside(self.owner.seams), torch.enable_grad():
            for cut, state in self._chunks_backwards():
                found += self._accumulate(cut, incoming, parameters, state)
        if self._drew:
            before.restore()
        return found

    def finish(
        self,
        incoming: dict[int, torch.Tensor],
        parameters: Sequence[nn.Parameter],
        state: RandomState,
        ambient: Ambient,
    ) -> None:
        """Accumulate into ``parameters`` for a forward that ran whole and whose graph was freed."""
        self._ambient, self._state_version, self._drew = (
            ambient,
            self.owner.state_version(),
            self.layout.draws,
        )
        self._cuts, self._states = [(0, self._size)], [state]
        with inside(self.owner.seams), torch.enable_grad():
            for cut, drawn in self._chunks_backwards():
                self._accumulate(cut, dict(incoming), parameters, drawn)

    def _receivers(self) -> list[nn.Parameter] | None:
        """Return the parameters that this backward is for; ``None`` for all that it reaches."""
        if not torch._C._will_engine_execute_node(self.anchor.grad_fn):  # type: ignore[arg-type]
            return []  # the script wants other gradients only
        then = {id(parameter) for parameter in self.parameters}
        if all(id(p) in then for p in self.owner.own if p.requires_grad):
            return None
        return [p for p in self.parameters if p.requires_grad]

    def _chunks_backwards(self) -> Iterator[tuple[Cut, RandomState | None]]:
        """Yield the chunks, last one first; smaller ones if memory has run out meanwhile.

        Chunks that drew random numbers keep their size: smaller ones would draw other numbers.
        """
        for cut, state in zip(self._cuts[::-1], self._states[::-1], strict=True):
            if self._drew or self._has_graph(cut):
                yield cut, state if self._drew else None
            else:
                yield from ((piece, None) for piece in cuts(*cut, self.owner.micro_batch)[::-1])

    def _has_graph(self, cut: Cut) -> bool:
        return self._graph is not None and self._graph.cut == cut

    def _hand_over(self, factor: torch.Tensor | None) -> None:
        assert self._gradients is not None
        pairs = zip(self.parameters, self._gradients, strict=True)
        found = [(p, g) for p, g in pairs if g is not None and p.requires_grad]
        self._gradients = None
        if factor is not None:
            multiply([gradient for _, gradient in found], factor)
        for parameter, gradient in found:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

    def _accumulate(
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
        on_host = self._drew and size > self.owner.micro_batch and not self._has_graph(cut)
        found, error = self._try_accumulate(cut, incoming, parameters, state, on_host)
        if error is None:
            return [(cut, found)]
        if _versions(self.parameters) != versions:  # some parameters have stepped already
            raise error
        candidates = self.parameters if parameters is None else parameters
        missing = self.owner.state.missing(candidates)
        smaller = self.owner.shrink(error, "backward", size)
        self._graph = None
        free_frames(error)
        if not smaller or on_host:
            raise error
        if self._drew or size == 1:
            found, error = self._try_accumulate(cut, incoming, missing, state, on_host=True)
            if error is not None:
                raise error
            return [(cut, found)]
        return [
            pair
            for half in cuts(*cut, self.owner.micro_batch)[::-1]
            for piece in cuts(*half, self.owner.micro_batch)[::-1]  # may be smaller by then
            for pair in self._accumulate(piece, incoming, missing, None)
        ]

    def _try_accumulate(
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
            shares = self._parts.shares(self.batch, incoming, cut)
            wanted = [index for index in shares if _needs_gradient(outputs[index])]
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
        graph, self._graph = self._graph, None
        if graph is not None and graph.cut == cut:
            return graph.leaves, graph.outputs
        return self._again(cut, state)

    def _again(
        self, cut: Cut, state: RandomState | None, *, apart: bool = True
    ) -> tuple[list[Any], list[Any]]:
        """Repeat the forward of ``cut`` with a graph; ``apart`` as in ``_forward``."""
        if self.owner.state_version() != self._state_version:
            raise Refused(CHANGED, SPLIT)
        if state is not None:
            state.restore()
        with self._ambient.again(), self._attributes.again():
            return self._forward(cut, apart=apart)

    def _drop_attempt(self, error: BaseException) -> None:
        """Free the graphs of a failed attempt and the frames that refer to them."""
        self._graph = None
        self._outputs = []
        self._gradients = None
        self._parts.drop()
        free_frames(error)

    def _empty_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class _UnknownScale(Exception):
    """Gradients flow in float16 and the loss scale is not known yet."""


class UnknownGraph(Exception):
    """A call's autograd graph has a shape that was not verified.

    The call had no effect: the generators and the model's plain attributes are restored.
    """

    def __init__(self, shape: str) -> None:
        super().__init__("a call of another kind than those before it")
        self.shape = shape


_ABSENT = object()
"""Replaces an argument tensor that autograd has saved."""


def sum_of(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two gradients; ``None`` counts as zero."""
    return other if one is None else one if other is None else one + other


def _needs_gradient(output: Any) -> bool:
    return isinstance(output, torch.Tensor) and output.requires_grad


def _versions(parameters: Sequence[nn.Parameter]) -> int:
    return sum(map(version_of, parameters))
