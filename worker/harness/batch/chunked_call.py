"""One call of a root in chunks: an autograd function whose backward runs real backward passes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from autofit.exceptions import Refused
from autofit.strategies.base import Forward
from autofit.worker.harness.batch.layout import Batch, Cut, Layout, cuts
from autofit.worker.harness.batch.loss_scale import LossScale, alike
from autofit.worker.harness.batch.outputs import Gradients, Parts, multiply, without_graph
from autofit.worker.harness.patching.observers import Seams, inside, plain_backward
from autofit.worker.harness.torch_state.host_saved import saved_on_host
from autofit.worker.harness.torch_state.module_state import Attributes, Once
from autofit.worker.harness.torch_state.pytree import flatten
from autofit.worker.harness.torch_state.rng import Ambient, RandomState

CHANGED = "the model's weights, buffers or mode changed between its forward and its backward"


class Owner(Protocol):
    """What a call needs of the root it belongs to (``elastic.Elastic``)."""

    seams: Seams
    own: list[nn.Parameter]
    """All the parameters of the root."""
    parameters: list[nn.Parameter]
    """Those that needed gradients when it was last called."""
    micro_batch: int
    accumulated: set[int]
    pending: WeakSet[Call]
    """Calls whose backward has not come yet."""
    puts_off: bool
    """Calls may wait for their loss (``awaited``)."""
    one_at_a_time: bool
    """Each call's backward comes before the next call, as far as has been seen."""
    loss_scale: LossScale
    draws_elsewhere: bool | None
    """The root draws from Python's or NumPy's generators; ``None`` before its first call."""
    even: bool
    """Its last call ran in even chunks: none was to be run again."""

    def cut(self, size: int, eager: bool) -> list[Cut]:
        """Return the chunks of a call; ``eager``: none of them is run again."""

    def shrink(self, error: BaseException, phase: str, size: int) -> bool:
        """Memory ran out with chunks of ``size``: make ``micro_batch`` smaller if it can be.

        Returns whether to go on; re-raises an error that is no shortage.
        """

    def came_back(self) -> None:
        """Notice that a call's backward is done."""

    def unrecognized(self, layout: Layout, outputs: Sequence[Any]) -> str | None:
        """Return the shape of a chunk's graph if it is none that was verified."""

    def held(self) -> nn.Module:
        """Return the root itself, which the script may have let go of by its backward."""

    def mark(self) -> object:
        """What must be the same in forward and backward: the root's mode, weights and buffers."""


class Bridge(torch.autograd.Function):
    """Stands in the script's graph for a root that runs in chunks."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tracked: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the chunks. ``tracked``: an anchor, then the arguments that need gradients."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Autograd frees them after backward, and notices when the script changes them in between.
        ctx.save_for_backward(*call.tensors())
        return call.run()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        """Accumulate into the parameters' ``.grad``; return the arguments' gradients."""
        if torch.is_grad_enabled():
            reason = "the script differentiates gradients (create_graph) through the model"
            raise Refused(reason, "micro_batch")
        gradients = ctx.call.back(cotangents, lambda: ctx.saved_tensors)
        ctx.call.owner.came_back()
        return (None, None, *gradients)


@dataclass
class Kept:
    """A chunk whose graph still stands."""

    cut: Cut
    leaves: list[Any]
    outputs: list[Any]


class Call:
    """One call of the root, from its forward to its backward."""

    def __init__(
        self, owner: Owner, forward: Forward, batch: Batch, layout: Layout, *, own: int = 0
    ) -> None:
        """``own``: the first of the outputs that is the root's; a loss may come before it."""
        self.owner = owner
        self._own = own
        self._recognized = False
        """Its graph has been looked at."""
        self.forward = forward
        self.batch = batch
        """Its tensors are there while forward or backward runs."""
        self.layout = layout
        self.parameters = owner.parameters
        """Those that needed gradients in forward."""
        self._size = layout.size(batch)
        tensors = ((i, x) for i, x in enumerate(batch.leaves) if isinstance(x, torch.Tensor))
        self.inputs = [index for index, tensor in tensors if tensor.requires_grad]
        """Arguments that themselves need gradients (another root's output, say)."""
        self._ambient = Ambient.now()
        self._root = owner.held()
        self._attributes = Attributes(self._root)
        """When forward begins: what runs again in backward finds them so."""
        self._mark: object = None
        """Of the owner, once forward has run."""
        # Not a leaf: autograd says of other nodes only whether a backward pass comes through.
        self.anchor = torch.empty(0, requires_grad=True).view(0)
        self._parts = Parts(layout, self._size)
        self._cuts: list[Cut] = []
        self._states: list[RandomState] = []
        """At the start of each chunk."""
        self._drew = False
        """The forward drew random numbers."""
        self._kept: Kept | None = None
        self._gradients: Gradients | None = None
        """Of the parameters, from eager backward."""
        self._factor: torch.Tensor | None = None
        """They are multiplied by it already."""
        self._robbed = False
        """A later call came first, and took them away."""
        self._outputs: list[Any] = []
        self._spec: TreeSpec | None = None
        self._tracked: list[int] = []
        """Outputs that autograd follows."""

    def __call__(self) -> Any:
        """Run it and return the root's output as the script expects it."""
        tracked = Bridge.apply(  # type: ignore[no-untyped-call]
            self, self.anchor, *(self.batch.leaves[i] for i in self.inputs)
        )
        outputs, self._outputs = self._outputs, []
        self._put_away()
        for index, tensor in zip(self._tracked, tracked, strict=True):
            outputs[index] = tensor
        assert self._spec is not None
        return tree_unflatten(outputs, self._spec)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the arguments."""
        return [leaf for leaf in self.batch.leaves if isinstance(leaf, torch.Tensor)]

    def _put_away(self) -> None:
        """Hold the arguments no longer; autograd does, until it has no more use for them."""
        leaves = [_ABSENT if isinstance(leaf, torch.Tensor) else leaf for leaf in self.batch.leaves]
        self.batch = Batch(leaves, self.batch.spec)

    def _take_out(self, saved: Callable[[], Sequence[torch.Tensor]]) -> None:
        if any(leaf is _ABSENT for leaf in self.batch.leaves):
            tensors = iter(saved())
            leaves = [next(tensors) if leaf is _ABSENT else leaf for leaf in self.batch.leaves]
            self.batch = Batch(leaves, self.batch.spec)

    # --- forward ---------------------------------------------------------------------------

    def run(self) -> tuple[torch.Tensor, ...]:
        """Run the chunks, smaller ones while memory runs out; return what autograd follows."""
        for other in list(self.owner.pending):
            other.spare()
        self.owner.pending.add(self)
        start = self._random_state()
        eager = self._can_be_eager()
        while (error := self._attempt(eager)) is not None:
            size = max(stop - start for start, stop in self._cuts)
            if eager:
                self._empty_gradients()
            if isinstance(error, _InHalf):
                eager, again = False, True
            elif isinstance(error, Unrecognized):
                again = False
            else:
                again = self.owner.shrink(error, "forward", size) and size > 1
            self._let_go(error)
            if isinstance(error, Unrecognized):
                start.restore()
                self._attributes.restore()
                if isinstance(self.forward, Once):
                    self.forward.restore()
            if not again:
                raise error
            start.restore()
        self._notice_draws(start)
        self._mark = self.owner.mark()
        self.owner.even = eager
        return tuple(self._outputs[index] for index in self._tracked)

    def _random_state(self) -> RandomState:
        """Save the generators' state: all of it, unless the root is known to use torch's alone."""
        return RandomState.now(
            elsewhere=self.layout.draws and self.owner.draws_elsewhere is not False
        )

    def _notice_draws(self, start: RandomState) -> None:
        """Note whether this forward drew: a layout says it of the first call alone."""
        end = self._random_state()
        self._drew = start != end
        if self.layout.draws and self.owner.draws_elsewhere is None:
            self.owner.draws_elsewhere = start.elsewhere != end.elsewhere

    def _attempt(self, eager: bool) -> Exception | None:
        self._cuts = self.owner.cut(self._size, eager)
        self._states = []
        try:
            with inside(self.owner.seams):
                parts = [self._parts.take(cut, self._chunk(cut, eager)) for cut in self._cuts]
                if eager:
                    self._gradients = [p.grad for p in self.parameters]
                    self._empty_gradients()
                self._outputs = self._parts.join(self.batch, self._cuts, parts)
        except Exception as error:  # noqa: BLE001 - the owner raises it again unless it is an OOM
            return error
        return None

    def _chunk(self, cut: Cut, eager: bool) -> list[Any]:
        self._states.append(self._random_state())
        keep = eager or cut == self._cuts[-1]
        with torch.set_grad_enabled(keep):
            leaves, outputs = self._forward(cut)
        if keep:
            self._tracked = [i for i, out in enumerate(outputs) if _needs_gradient(out)]
            self._recognize(outputs)
        if eager:
            self._differentiate(outputs, cut)
        elif keep:
            self._kept = Kept(cut, leaves, list(outputs))
        return [without_graph(out) for out in outputs]

    def _recognize(self, outputs: list[Any]) -> None:
        """Raise ``Unrecognized`` where the first graph of the call is none that was verified."""
        if self._recognized:
            return
        if (shape := self.owner.unrecognized(self.layout, outputs[self._own :])) is not None:
            raise Unrecognized(shape)
        self._recognized = True

    def _differentiate(self, outputs: list[Any], cut: Cut) -> None:
        """Run an eager chunk's backward; raise ``_InHalf`` where that needs a scale not known."""
        (loss,) = self._means()
        if not outputs[loss].requires_grad:  # of frozen parameters alone
            return
        scale, ambient = self.owner.loss_scale, self._ambient
        half = scale.matters(ambient)
        if half is None and (half := scale.learn(ambient, outputs[loss])):
            raise _InHalf
        self._factor = scale.factor if half else None
        if weight := self._parts.weight(self.batch, loss, cut):
            cotangent = torch.full_like(outputs[loss], weight)
            with ambient.off().again():
                plain_backward(
                    outputs[loss],
                    cotangent if self._factor is None else cotangent.mul_(self._factor),
                )

    def _forward(self, cut: Cut) -> tuple[list[Any], list[Any]]:
        """Run the root on some samples; return its flattened arguments and outputs."""
        if torch.is_grad_enabled():
            torch.clear_autocast_cache()  # casts made without a graph would cut the weights off
        leaves = self.layout.take(self.batch, cut)
        for index in self.inputs:
            leaves[index] = leaves[index].detach().requires_grad_()
        args, kwargs = self.batch.call(leaves)
        outputs, self._spec = flatten(self.forward(*args, **kwargs))
        return leaves, outputs

    def _means(self) -> list[int]:
        joins = enumerate(self.layout.joins)
        return [i for i, join in joins if join.scalar and not join.detached]

    def _can_be_eager(self) -> bool:
        """Whether each chunk's backward can run at once, in forward.

        Not while ``.grad`` holds something, or another call will: kept aside, the gradients would
        then exist twice. Not where parameters step in backward. Not in float16 before the loss's
        scale is known.
        """
        scale = self.owner.loss_scale
        return (
            len(self._means()) == 1
            and not self.inputs
            and self.owner.one_at_a_time
            and not self.owner.seams.stepping
            and all(parameter.grad is None for parameter in self.parameters)
            and (scale.settled or not scale.matters(self._ambient))
        )

    def spare(self) -> None:
        """Give up what only saves time: another call of the root begins before our backward."""
        self._kept = None
        self._robbed = self._robbed or self._gradients is not None
        self._gradients = None

    # --- backward --------------------------------------------------------------------------

    def back(
        self,
        cotangents: Sequence[torch.Tensor | None],
        saved: Callable[[], Sequence[torch.Tensor]],
    ) -> Gradients:
        """Bring the gradients into ``.grad``; return those of the arguments that need them.

        ``saved`` gives the tensors among the arguments; raises where the script has changed them.
        """
        self.owner.pending.discard(self)
        if self._robbed:
            self.owner.one_at_a_time = False
        incoming = dict(zip(self._tracked, cotangents, strict=True))
        present = [index for index, cotangent in incoming.items() if cotangent is not None]
        if present == self._means() and self._is_handed_over(incoming[present[0]]):
            return []
        self.owner.puts_off &= self._gradients is None  # else more than the loss is used
        self._gradients = None
        self._take_out(saved)
        try:
            found = self._run_again(incoming)
            found.sort(key=lambda pair: pair[0])
            return self._parts.join_arguments(self.batch, self.inputs, found)
        finally:
            self._kept = None
            self._put_away()

    def _is_handed_over(self, factor: torch.Tensor | None) -> bool:
        """Hand the gradients of eager backward over, if they are there and in the right scale."""
        assert factor is not None
        scale = self.owner.loss_scale
        right = self._factor is None
        if scale.matters(self._ambient):
            right = alike(self._factor, factor)
            scale.note(factor)
        if self._gradients is None or not right:
            return False
        self._hand_over(factor if self._factor is None else None)
        return True

    def _run_again(self, incoming: dict[int, torch.Tensor | None]) -> list[tuple[Cut, Gradients]]:
        found: list[tuple[Cut, Gradients]] = []
        parameters = self._receivers()
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
        """Accumulate into ``parameters`` for a forward that ran whole, and whose graph is gone."""
        self._ambient, self._mark, self._drew = ambient, self.owner.mark(), self.layout.draws
        self._cuts, self._states = [(0, self._size)], [state]
        with inside(self.owner.seams), torch.enable_grad():
            for cut, drawn in self._chunks_backwards():
                self._accumulate(cut, dict(incoming), parameters, drawn)

    def _receivers(self) -> list[nn.Parameter] | None:
        """Return the parameters that this backward pass is for; ``None`` for all it leads to."""
        if not torch._C._will_engine_execute_node(self.anchor.grad_fn):  # type: ignore[arg-type]
            return []  # the script asks for the gradients of something else alone
        then = {id(parameter) for parameter in self.parameters}
        if all(id(p) in then for p in self.owner.own if p.requires_grad):
            return None
        return [p for p in self.parameters if p.requires_grad]

    def _chunks_backwards(self) -> Iterator[tuple[Cut, RandomState | None]]:
        """Yield the chunks, the kept one first; smaller ones once memory has run out.

        Not where they drew: cut otherwise they would draw otherwise.
        """
        for cut, state in zip(self._cuts[::-1], self._states[::-1], strict=True):
            if self._drew or self._stands(cut):
                yield cut, state if self._drew else None
            else:
                yield from ((piece, None) for piece in cuts(*cut, self.owner.micro_batch)[::-1])

    def _stands(self, cut: Cut) -> bool:
        return self._kept is not None and self._kept.cut == cut

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
        """Add the gradient of some samples to ``parameters`` (``None``: to every leaf).

        If memory runs out: in smaller pieces, for those that have not received it. Samples that
        drew stay together and keep their draws; they run once more with what autograd saves in
        host memory.
        """
        self.owner.accumulated.clear()
        size = cut[1] - cut[0]
        versions = _versions(self.parameters)
        on_host = self._drew and size > self.owner.micro_batch and not self._stands(cut)
        found, error = self._try_accumulate(cut, incoming, parameters, state, on_host)
        if error is None:
            return [(cut, found)]
        if _versions(self.parameters) != versions:  # some have stepped: nothing can run again
            raise error
        candidates = self.parameters if parameters is None else parameters
        missing = [p for p in candidates if p.requires_grad and id(p) not in self.owner.accumulated]
        smaller = self.owner.shrink(error, "backward", size)
        self._kept = None
        traceback.clear_frames(error.__traceback__)
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
            for piece in cuts(*half, self.owner.micro_batch)[::-1]  # smaller again by then, maybe
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
                leaves, outputs = self._graph(cut, state)
            shares = self._parts.shares(self.batch, incoming, cut)
            wanted = [index for index in shares if _needs_gradient(outputs[index])]
            self.owner.seams.parts_follow = cut[0] > 0  # the first samples come last
            arguments = [leaves[index] for index in self.inputs]
            leaf = None if parameters is None else [*parameters, *arguments]
            if wanted and leaf != []:
                plain_backward(
                    [outputs[i] for i in wanted], [shares[i] for i in wanted], inputs=leaf
                )
            return [argument.grad for argument in arguments], None
        except Exception as error:  # noqa: BLE001 - the owner raises it again unless it is an OOM
            return [], error
        finally:
            self.owner.seams.parts_follow = False

    def _graph(self, cut: Cut, state: RandomState | None) -> tuple[list[Any], list[Any]]:
        kept, self._kept = self._kept, None
        if kept is not None and kept.cut == cut:
            return kept.leaves, kept.outputs
        if self.owner.mark() != self._mark:
            raise Refused(CHANGED, "micro_batch")
        if state is not None:
            state.restore()
        with self._ambient.again(), self._attributes.again():
            return self._forward(cut)

    def _let_go(self, error: BaseException) -> None:
        """Free what the failed attempt holds: its graphs, and the frames that hold them."""
        self._kept = None
        self._outputs = []
        self._gradients = None
        self._parts.drop()
        traceback.clear_frames(error.__traceback__)

    def _empty_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class _InHalf(Exception):
    """Gradients turned out to flow in float16, the loss's scale being unknown yet."""


class Unrecognized(Exception):
    """A call has made a graph of another shape than those that were verified.

    Nothing has come of the call: the generators and the model's plain attributes are put back.
    """

    def __init__(self, shape: str) -> None:
        super().__init__("a call of another kind than those before it")
        self.shape = shape


_ABSENT = object()
"""In the place of a tensor that autograd holds for us."""


def _needs_gradient(output: Any) -> bool:
    return isinstance(output, torch.Tensor) and output.requires_grad


def _versions(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter._version for parameter in parameters)
