"""Runs a root's calls in chunks; the script's training loop stays as it is.

``chunked_call.ChunkedCall`` runs the root chunk by chunk, and only one chunk's graph exists at a
time. A step therefore needs no more memory than a hand-written accumulation loop. There are three
modes:

* *recompute*: every chunk but the last runs without a graph, and runs again in backward. Backward
  starts with the last chunk, so that chunk is as large as it may be. This mode is always correct.
* *eager*: each chunk's backward runs right after its forward, and nothing is recomputed. The root
  must return the loss, or the call is delayed until the script calls a loss function of torch
  (``lazy_output``). The gradients are stored and multiplied by the incoming gradient in backward.
  This mode requires an empty ``.grad`` without hooks; otherwise the gradients would exist twice.
* *early*: the same where ``.grad`` holds gradients of an earlier call: the chunks add to them
  (``early_gradients``).

When memory runs out, smaller chunks run from the stored inputs, and the step has the same
gradients. A forward simply starts again. In backward, some parameters have received the failed
chunk's gradient and others have not. The chunk's samples run again for the others only
(``backward(inputs=...)``), so no copy of ``.grad`` is needed. Samples that drew random numbers are
not divided then: they run again with the same draws, with autograd's saved tensors in host memory
(``host_saved``), and the chunks are smaller from the next call on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autofit.exceptions import Refused
from autofit.strategies import SPLIT
from autofit.strategies.base import Forward
from autofit.worker.harness.batch.call_state import CallState
from autofit.worker.harness.batch.chunk_runs import ChunkRuns
from autofit.worker.harness.batch.chunked_call import ChunkedCall, UnknownGraph
from autofit.worker.harness.batch.ddp import DdpReduction
from autofit.worker.harness.batch.evaluation import Evaluation, FindValues
from autofit.worker.harness.batch.layout import (
    Batch,
    Cut,
    Join,
    Layout,
    Rule,
    Unverified,
    cuts,
    cuts_for_keeping,
    equal_cuts,
)
from autofit.worker.harness.batch.lazy_output import DelayedCall, LazyOutput, Loss, saved_by_hooks
from autofit.worker.harness.patching.observers import Seams
from autofit.worker.harness.torch_state.module_state import Attributes, update_at_first_call
from autofit.worker.harness.torch_state.module_watch import ModuleWatch
from autofit.worker.harness.torch_state.modules import (
    foreign,
    hooks_of_script,
    version_of,
    without_cache,
)
from autofit.worker.harness.torch_state.rng import Ambient, RandomState

OnShortage = Callable[[BaseException, str, int], bool]
"""Called with ``(error, phase, micro_batch)`` when memory ran out.

Returns whether to try again with smaller chunks. Raises ``error`` again if it is no shortage.
"""


InOnePiece = Callable[[str, Forward, Any, Any], Any]
"""Called with the reason, the forward, its positional and its keyword arguments."""


class VerifiedLayouts(Protocol):
    """The verified layouts of one root, as far as its chunked calls use them."""

    def verify_again(self, layout: Layout, batch: Batch, shape: str) -> Layout:
        """Verify a kind of call on ``batch``, whose autograd graph has the new ``shape``.

        Raises ``Refused`` if the split does not hold on it.
        """

    def unknown_graph(
        self,
        layout: Layout,
        outputs: Sequence[Any],
        parameters: Sequence[torch.Tensor],
        nodes: int,
    ) -> str | None:
        """Return the shape of the graph behind ``outputs``; ``None`` if it was verified.

        ``nodes``: how many nodes the call has made.
        """

    def forget(self) -> None:
        """Drop all layouts: a call has contradicted one."""


NO_SAMPLES = "it holds no samples"
UNKNOWN_GRAPH = "its autograd graph differs from those that were verified"


class ChunkedRoot:
    """Runs the calls of one root in chunks of at most ``micro_batch`` samples."""

    def __init__(
        self,
        module: nn.Module,
        seams: Seams,
        micro_batch: int,
        *,
        find_layout: FindValues,
        layouts: VerifiedLayouts,
        watch: ModuleWatch,
        on_shortage: OnShortage,
        reduction: DdpReduction | None = None,
        in_one_piece: InOnePiece | None,
        one_size: bool = False,
    ) -> None:
        """``find_layout`` relies on the last look of ``watch`` at the module.

        ``in_one_piece`` runs a call that cannot be split; ``None`` where it is refused.

        ``reduction``: coordinates the reduction if the root is a ``DistributedDataParallel``.
        """
        self.seams = seams
        self.micro_batch = micro_batch
        self.own: list[nn.Parameter] = []
        self.parameters: list[nn.Parameter] = []
        """The parameters that require gradients now; the script may freeze and unfreeze some."""
        self.state = CallState(
            can_delay=reduction is None,
            one_at_a_time=reduction is None or not reduction.finds_unused,
        )
        self._outlines: dict[object, tuple[torch.Tensor, torch.device]] = {}
        """Shape and device of the outputs that may be delayed, by the kind of call."""
        self.one_size = one_size
        """All chunks of a call have one size, if the number of samples allows it."""
        self._module = weakref.ref(module)
        self._find_layout = find_layout
        self._layouts = layouts
        self._watch = watch
        self._structure = -1
        """That of the module when its parameters and hooks were read."""
        self._has_split = False
        """A call has run in chunks without an error."""
        self._on_shortage = on_shortage
        self._evaluation = Evaluation(find_layout, on_shortage)
        self._reduction = reduction
        self._in_one_piece = in_one_piece
        self._all_buffers: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []
        self._listens = False
        """The script has a hook on a gradient of the root."""
        self._hooks: list[RemovableHandle] = []
        self._update_parameters()

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        while self._hooks:
            self._hooks.pop().remove()

    def _update_parameters(self) -> None:
        """Find the parameters that require gradients, and hooks on them, if the module changed."""
        self._watch.look()
        if self._watch.structure == self._structure:
            return
        self._structure = self._watch.structure
        modules = self._watch.modules
        self.own = _distinct(each._parameters for each in modules)
        self._all_buffers = self._buffers = _distinct(each._buffers for each in modules)
        found = [parameter for parameter in self.own if parameter.requires_grad]
        if [id(p) for p in found] != [id(p) for p in self.parameters]:
            self.remove()
            self.parameters = found
            if (reduction := self._reduction) is not None:
                self._hooks = [
                    p.register_post_accumulate_grad_hook(reduction.received) for p in found
                ]
        of_layers = (
            hooks for each in modules for hooks in (each._backward_hooks, each._backward_pre_hooks)
        )
        self._listens = any(map(hooks_of_script, self.parameters)) or any(map(foreign, of_layers))

    @property
    def attributes(self) -> Attributes:
        """The plain attributes of the module, as of the last look."""
        return self._watch.attributes

    def __call__(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run a call in chunks, with the outputs and gradients of the whole batch."""
        self._update_parameters()
        if not torch.is_grad_enabled():
            return self._around(lambda: self._evaluation(forward, args, kwargs))
        self.refuse_listeners()
        batch = Batch.of(args, without_cache(self._module(), kwargs))
        if not (self.parameters or _requires_gradients(batch)):  # all are frozen
            return self._around(lambda: self._evaluation(forward, args, kwargs))
        try:
            return self._split(forward, batch)
        except Refused as refusal:
            reason = self._reason_for_whole(refusal)
        return self._around(lambda: self._whole(reason, forward, args, kwargs))

    def _reason_for_whole(self, refusal: Refused) -> str:
        """Return why a call runs in one piece; raise the refusal if it must not."""
        first = not (self._has_split or isinstance(refusal, Unverified))
        if first or _is_of_other_strategy(refusal):
            raise refusal
        if self._in_one_piece is None:
            reason = f"a later batch cannot be split: {refusal}"
            raise Refused(reason, SPLIT) from refusal
        return str(refusal)

    def check_call(self, args: Any, kwargs: Any) -> None:
        """Raise ``Refused`` if a call with gradients would, before anything has run."""
        self._update_parameters()
        self.refuse_listeners()
        batch = Batch.of(args, without_cache(self._module(), kwargs))
        if not self._find_layout(batch, gradients=True).size(batch):
            raise Refused(NO_SAMPLES)

    def _split(self, forward: Forward, batch: Batch) -> Any:
        for last in (False, True):
            layout = self._find_layout(batch, gradients=True)
            if not layout.size(batch):
                raise Refused(NO_SAMPLES)
            start = RandomState.now() if layout.draws else None
            self._ignore_updated_buffers(layout)
            call = ChunkedCall(self, update_at_first_call(forward, layout.updates), batch, layout)
            try:
                output = self._attempt(call, forward, batch, start)
            except UnknownGraph as unknown:
                if last:
                    raise Refused(UNKNOWN_GRAPH, SPLIT) from None
                self._layouts.verify_again(layout, batch, unknown.shape)
            except Refused as refusal:  # the verified layout does not hold for this batch
                if _is_of_other_strategy(refusal):
                    raise
                if start is not None:
                    start.restore()
                self._layouts.forget()
                if last:
                    raise
            else:
                self._has_split = True
                if (
                    self.state.can_delay
                    and not call.runs.inputs
                    and _has_one_row_a_sample(layout, output)
                ):
                    outline = torch.empty_like(output, device="meta")
                    self._outlines[self._kind(batch)] = outline, output.device
                return output
        raise AssertionError("the second attempt returns or raises")

    def _attempt(
        self, call: ChunkedCall, forward: Forward, batch: Batch, start: RandomState | None
    ) -> Any:
        """Run a call in chunks; in one piece if that fails and other ranks make no second call.

        ``start``: the state of the generators, if the call draws.
        """
        if (reduction := self._reduction) is None:
            return call()

        def run() -> Any:
            try:
                return call()
            except UnknownGraph:
                reason = self._reason_for_whole(Refused(UNKNOWN_GRAPH, SPLIT))
            except Refused as refusal:
                reason = self._reason_for_whole(refusal)
            if start is not None:
                start.restore()
            return self._whole(reason, forward, *batch.call(batch.leaves))

        return reduction.forward(run)

    def unknown_graph(self, layout: Layout, outputs: Sequence[Any], nodes: int) -> str | None:
        """Return the shape of a chunk's autograd graph; ``None`` if it was verified."""
        return self._layouts.unknown_graph(layout, outputs, self.own, nodes)

    def delay(
        self,
        forward: Forward,
        args: Any,
        kwargs: Any,
        call: Callable[[Any, Any], Any],
        enter: Callable[[], AbstractContextManager[None]],
    ) -> LazyOutput | None:
        """Return the lazy output of a delayed call; ``None`` if the call must run now.

        Only a kind of call that has run in chunks, with one output row a sample, can be delayed.
        ``call`` runs the call at once; ``enter`` returns a context inside the root.
        """
        if self.seams.compiles_functions or self.seams.differentiates_for_outputs:
            return None
        if not (self.state.can_delay and self._outlines):
            return None
        if torch._C._len_torch_dispatch_stack() or saved_by_hooks():  # they are to see the call
            return None
        batch = Batch.of(args, without_cache(self._module(), kwargs))
        self._update_parameters()
        if not self.parameters:
            return None
        known = self._outlines.get(self._kind(batch))
        if known is None or self._listens or _requires_gradients(batch):
            return None
        layout = self._find_layout(batch, gradients=True)
        if len(self.cut(layout.size(batch), eager=True)) < 2:
            return None
        self._ignore_updated_buffers(layout)
        delayed = DelayedCall(self, forward, batch, layout, call, enter)
        self.seams.delayed_calls.add(delayed)
        return LazyOutput.of(delayed, *known)

    def run_with_loss(self, call: DelayedCall, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a delayed call with its loss; return the loss and the output."""
        layout, ambient, plain = call.layout, call.ambient, call.forward
        args, kwargs = call.batch.call(call.batch.leaves)

        def forward(target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with ambient.again():  # a copy: the call would form a reference cycle
                output = plain(*args, **kwargs)
            return loss(output, target), output

        batch = Batch.of((loss.target, *args), kwargs)

        def together(layout: Layout) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
            both = replace(
                layout,
                batched=(0, *(index + 1 for index in layout.batched)),
                joins=(loss.reduction.join, *layout.joins),
            )
            return ChunkedCall(
                self, update_at_first_call(forward, layout.updates), batch, both, first_output=1
            )

        with call.enter():
            try:
                return together(layout)()
            except UnknownGraph as unknown:
                shape = unknown.shape
            try:
                return together(self._layouts.verify_again(layout, call.batch, shape))()
            except Refused as refusal:
                if self._in_one_piece is None or _is_of_other_strategy(refusal):
                    raise
                both: tuple[torch.Tensor, torch.Tensor] = self._whole(
                    str(refusal), forward, *batch.call(batch.leaves)
                )
                return both

    def _kind(self, batch: Batch) -> object:
        """Return a key for calls whose outputs have the same shape, data type and device."""
        leaves = tuple(
            (leaf.shape, leaf.dtype, leaf.device)
            if isinstance(leaf, torch.Tensor)
            else _identity(leaf)
            for leaf in batch.leaves
        )
        module = self._module()
        return leaves, batch.spec, module is not None and module.training, Ambient.now()

    def _ignore_updated_buffers(self, layout: Layout) -> None:
        moving = {id(place.tensor()) for place in layout.updates}
        self._buffers = [each for each in self._all_buffers if id(each) not in moving]

    def _whole(self, reason: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run a batch in one piece because it cannot be split.

        No chunk has had an effect yet, so this is exactly the script's own step.
        """
        assert self._in_one_piece is not None, "the call is not refused"
        if self._reduction is not None:
            self._reduction.runs_whole()
        try:
            return self._in_one_piece(reason, forward, args, kwargs)
        except Exception as error:
            error.add_note(f"autofit: a batch runs in one piece: {reason}")
            raise

    def _around(self, run: Callable[[], Any]) -> Any:
        return run() if self._reduction is None else self._reduction.forward(run)

    def finish(
        self,
        forward: Forward,
        batch: Batch,
        incoming: dict[int, torch.Tensor],
        parameters: list[nn.Parameter],
        state: RandomState,
        ambient: Ambient,
    ) -> None:
        """Accumulate the gradients of a call that ran whole into ``.grad`` of ``parameters``.

        ``incoming`` has the gradient of each output that the script uses. ``state`` and
        ``ambient`` are the random state and the autocast state of the forward.
        """
        runs = ChunkRuns(self, forward, batch, self._find_layout(batch, gradients=True))
        runs.finish(incoming, parameters, state, ambient)

    def refuse_listeners(self) -> None:
        """Raise ``Refused`` if a hook of the script would see the gradient of each chunk."""
        if self._listens:
            reason = "a hook of the script would see gradients of parts of the batch"
            raise Refused(reason, SPLIT)

    def backward_done(self) -> None:
        """Notice that the backward of a call has ended."""
        if self._reduction is not None:
            self._reduction.backward_done()

    def cut(self, size: int, eager: bool) -> list[Cut]:
        """Return the chunks of a call; ``eager``: no chunk runs again in backward."""
        if self.one_size:
            return equal_cuts(size, self.micro_batch)
        return (
            cuts(0, size, self.micro_batch) if eager else cuts_for_keeping(size, self.micro_batch)
        )

    def shrink(self, error: BaseException, phase: str, size: int) -> bool:
        """Halve the chunks after memory ran out in ``size`` samples; return whether to retry."""
        if not self._on_shortage(error, phase, size):
            return False
        self.micro_batch = min(self.micro_batch, -(-size // 2))
        return True

    def live_module(self) -> nn.Module:
        """Return the module, which exists while it is called."""
        module = self._module()
        assert module is not None, "a root outlives its calls"
        return module

    def state_version(self) -> tuple[bool, int]:
        """Return the mode and the sum of the tensors' versions.

        Both must be the same in forward and backward.
        """
        module = self._module()
        versions = sum(map(version_of, self.own)) + sum(map(version_of, self._buffers))
        return (module.training if module is not None else False), versions


def _is_of_other_strategy(refusal: Refused) -> bool:
    """Return whether a strategy other than the split refuses."""
    return refusal.strategy not in (None, SPLIT)


def _has_one_row_a_sample(layout: Layout, output: Any) -> bool:
    """Return whether a call's output is one tensor whose rows are the samples."""
    rows = layout.dim == 0 and layout.joins == (Join(Rule.CONCATENATE),)
    return rows and type(output) is torch.Tensor and output.requires_grad


def _identity(argument: Any) -> object:
    """Return a key for an argument; one without a ``repr`` equals no other argument."""
    try:
        return repr(argument)
    except Exception:  # noqa: BLE001 - the script's own class
        return object()


def _requires_gradients(batch: Batch) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in batch.leaves)


def _distinct(each: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the distinct tensors of all mappings."""
    return list({id(t): t for found in each for t in found.values() if t is not None}.values())
