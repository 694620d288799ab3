"""One call of a root in chunks: an autograd function whose backward runs the chunks' backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_unflatten

from autofit.exceptions import Refused
from autofit.strategies import SPLIT
from autofit.strategies.base import Forward
from autofit.worker.harness.batch.call_state import Rows, equal_factors, equal_kind
from autofit.worker.harness.batch.chunk_runs import (
    ChunkGraph,
    ChunkRuns,
    Owner,
    needs_gradient,
)
from autofit.worker.harness.batch.early_gradients import EarlyGradients
from autofit.worker.harness.batch.late_output import LateOutput
from autofit.worker.harness.batch.late_rows import LateRows, is_large, outline, stand_in
from autofit.worker.harness.batch.layout import Batch, Cut, Layout
from autofit.worker.harness.batch.outputs import Gradients, multiply, without_graph
from autofit.worker.harness.patching.gradient_reads import Marks, gradient_of, marks
from autofit.worker.harness.patching.observers import inside, plain_backward
from autofit.worker.harness.torch_state.graph import nodes_made
from autofit.worker.harness.torch_state.host_saved import copy_on_host
from autofit.worker.harness.torch_state.module_state import FirstCallUpdates
from autofit.worker.oom.attempt import free_frames, is_shortage

CREATE_GRAPH = "the script differentiates the gradients of the model's parameters (create_graph)"


class ChunkedFunction(torch.autograd.Function):
    """The autograd node that represents a chunked root in the script's graph."""

    @staticmethod
    def forward(ctx: Any, call: ChunkedCall, *tracked: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the chunks. ``tracked``: the anchor, then the arguments that require gradients."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Autograd frees saved tensors after backward, and detects changes in place until then.
        ctx.save_for_backward(*call.runs.tensors())
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
        self.runs = ChunkRuns(owner, forward, batch, layout)
        self.layout = layout
        self.parameters = owner.parameters
        """The parameters that required gradients in forward."""
        self._first_output = first_output
        self._recognized = False
        """The shape of this call's autograd graph was compared with the verified ones."""
        # A view, not a leaf: autograd tells only of such nodes whether a backward visits them.
        self.anchor = torch.empty(0, requires_grad=True).view(0)
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
        self._tracked: list[int] = []
        """Positions of the outputs that autograd follows."""

    def __call__(self) -> Any:
        """Run the chunks; return the root's output with its original structure."""
        arguments = self.runs.batch.leaves
        tracked = ChunkedFunction.apply(  # type: ignore[no-untyped-call]
            self, self.anchor, *(self.runs.batch.leaves[i] for i in self.runs.inputs)
        )
        outputs, self._outputs = self._outputs, []
        self.runs.drop_arguments()
        for index, tensor in zip(self._tracked, tracked, strict=True):
            outputs[index] = tensor
        for index, late in self._late_outputs(arguments, outputs).items():
            outputs[index] = late
        assert self.runs.spec is not None
        return tree_unflatten(outputs, self.runs.spec)

    def _late_outputs(self, arguments: list[Any], outputs: list[Any]) -> dict[int, LateOutput]:
        """Return what the script gets in the place of outputs that are not kept."""
        if not self._outlines:
            return {}
        state, hosted, self._hosted = self.owner.state, self._hosted, {}
        rows = LateRows(self.runs.rows_again, state, self.layout, self.runs.cuts, arguments)
        self._late_rows = weakref.ref(rows)
        self.owner.seams.delayed_calls.add(rows)
        return rows.outputs(self._outlines, outputs, hosted)

    # --- forward ---------------------------------------------------------------------------

    def run(self) -> tuple[torch.Tensor, ...]:
        """Run the chunks, smaller ones if memory runs out; return the outputs with a gradient."""
        self.owner.state.begin_forward(self)
        start = self.runs.random_state()
        self._adds = self.owner.state.factor is not None and self._could_add()
        eager = self._adds or self._can_be_eager()
        while (error := self._attempt(eager)) is not None:
            size = max(stop - start for start, stop in self.runs.cuts)
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
                self.runs.attributes.restore()
                if isinstance(self.runs.forward, FirstCallUpdates):
                    self.runs.forward.restore()
            if not again:
                raise error
            start.restore()
        end = self.runs.random_state()
        self.runs.drew = start != end
        if self.layout.draws and self.owner.state.draws_elsewhere is None:
            self.owner.state.draws_elsewhere = start.elsewhere != end.elsewhere
        self.runs.state_version = self.owner.state_version()
        if self._adds:
            (loss,) = self._loss_outputs()
            assert self._factor is not None, "the chunks were differentiated"
            self._early = EarlyGradients(self.runs, loss, self._factor)
        elif not eager and self._could_add():
            self._found = marks(self.parameters)
        self._outlines = {index: self._outputs[index] for index in self._late}
        for index, like in self._outlines.items():
            self._outputs[index] = stand_in(like, self._late[index])
        return tuple(self._outputs[index] for index in self._tracked)

    def _attempt(self, eager: bool) -> Exception | None:
        self.runs.cuts = self.owner.cut(self.runs.size, eager)
        self.runs.states = []
        self._late, self._hosted = {}, {}
        self._added = []
        try:
            with inside(self.owner.seams):
                parts = [
                    self.runs.parts.collect(cut, self._chunk(cut, eager)) for cut in self.runs.cuts
                ]
                if eager and not self._adds:
                    self._gradients = [*map(gradient_of, self.parameters)]
                    self._empty_gradients()
                self._outputs = self.runs.parts.join(self.runs.batch, self.runs.cuts, parts)
        except Exception as error:  # noqa: BLE001 - the owner raises it again unless it is an OOM
            return error
        return None

    def _chunk(self, cut: Cut, eager: bool) -> list[Any]:
        self.runs.states.append(self.runs.random_state())
        # Without gradients of earlier calls there is nothing to note.
        self.owner.state.begin_chunk(self.parameters if self._adds else ())
        graph = eager or cut == self.runs.cuts[-1]
        made = nodes_made()
        with torch.set_grad_enabled(graph):
            leaves, outputs = self.runs.run(cut)
        if graph:
            self._tracked = [i for i, out in enumerate(outputs) if needs_gradient(out)]
            self._recognize(outputs, nodes_made() - made)
            if not eager:
                self.runs.graph = ChunkGraph(cut, leaves, list(outputs))
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
        if kept is Rows.ON_DEVICE or len(self.runs.cuts) < 2 or len(outputs) != len(joins):
            return outputs
        if cut == self.runs.cuts[0] and self._loss_outputs():
            times = self.runs.size / (cut[1] - cut[0])
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
        scale, ambient = self.owner.state.loss_scale, self.runs.ambient
        half = scale.matters(ambient)
        if half is None and (half := scale.learn(ambient, loss)):
            raise _UnknownScale
        self._factor = self.owner.state.factor if self._adds else scale.factor if half else None
        if self._adds and (half or not equal_kind(self._factor, loss)):
            raise _UnknownScale
        if weight := self.runs.parts.weight(self.runs.batch, index, cut):
            cotangent = torch.full_like(loss, weight)
            with ambient.off().again():
                plain_backward(
                    loss, cotangent if self._factor is None else cotangent.mul_(self._factor)
                )

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
            and (scale.settled or not scale.matters(self.runs.ambient))
        )

    def _backward_may_follow(self) -> bool:
        """Return whether a chunk's loss gives all gradients, whatever ``.grad`` holds."""
        return (
            len(self._loss_outputs()) == 1
            and not self.runs.inputs
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
            and self.owner.state.loss_scale.matters(self.runs.ambient) is not True
            and any(mark is not None for mark in marks(self.parameters))
        )

    def _subtract_attempt(self) -> None:
        """Subtract what the chunks of a failed attempt have added, and add no more."""
        self._adds = False
        factor, state = self.owner.state.factor, self.owner.state
        state.stop_adding()
        (loss,) = self._loss_outputs()
        assert factor is not None, "the chunks have added with a factor"
        self.runs.state_version, self.runs.drew = self.owner.state_version(), self.layout.draws
        before = self.runs.random_state()
        pairs = list(zip(self.runs.cuts, self.runs.states, strict=False))
        some = state.arrived(self.parameters)
        with inside(self.owner.seams), torch.enable_grad():
            for cut, drawn in pairs:
                receivers = None if cut in self._added else some
                if receivers != []:
                    # The attempt has failed, so whether it drew is not known: restore in any case.
                    self.runs.accumulate(cut, {loss: -factor}, receivers, drawn)
        before.restore()

    def release(self) -> None:
        """Free the graph and the gradients: the root is called again before this backward."""
        self.runs.graph = None
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
        early, self._early = self._early, None
        if early is not None and not early.over:
            early.settle(incoming, present, saved)
            return []
        if present == self._loss_outputs() and self._hand_over_if_scaled(incoming[present[0]]):
            return []
        if self._gradients is not None:  # the script uses more than the loss
            self.owner.state.stop_delaying()
        self._gradients = None
        self.runs.restore_arguments(saved)
        try:
            found = self.runs.run_again(incoming, self._receivers())
            found.sort(key=lambda pair: pair[0])
            return [*self.runs.parts.join_arguments(self.runs.batch, self.runs.inputs, found)]
        finally:
            self.runs.graph = None
            self.runs.drop_arguments()

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

    def _hand_over_if_scaled(self, factor: torch.Tensor | None) -> bool:
        """Move eager gradients into ``.grad`` if they exist and have the right loss scale."""
        assert factor is not None
        scale = self.owner.state.loss_scale
        right = self._factor is None
        if scale.matters(self.runs.ambient):
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

        Raises ``Refused`` if the parameters' gradients are to have a graph too.
        """
        if self._receivers() != []:
            raise Refused(CREATE_GRAPH, SPLIT)
        return self.runs.differentiable(dict(zip(self._tracked, cotangents, strict=True)), saved)

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
        self.runs.restore_arguments(saved)
        try:
            for parameter in parameters:
                parameter.grad = None
            self.runs.run_again(dict(zip(self._tracked, cotangents, strict=True)), parameters)
            return [*map(gradient_of, parameters)]
        finally:
            self.runs.drop_arguments()
            for parameter, gradient in zip(parameters, held, strict=True):
                parameter.grad = gradient

    def _receivers(self) -> list[nn.Parameter] | None:
        """Return the parameters that this backward is for; ``None`` for all that it reaches."""
        if not torch._C._will_engine_execute_node(self.anchor.grad_fn):  # type: ignore[arg-type]
            return []  # the script wants other gradients only
        then = {id(parameter) for parameter in self.parameters}
        if all(id(p) in then for p in self.owner.own if p.requires_grad):
            return None
        return [p for p in self.parameters if p.requires_grad]

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

    def _drop_attempt(self, error: BaseException) -> None:
        """Free the graphs of a failed attempt and the frames that refer to them."""
        self.runs.graph = None
        self._outputs = []
        self._gradients = None
        self.runs.parts.drop()
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
