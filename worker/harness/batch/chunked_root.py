"""Chunked forward: a root's call in pieces, while the loop around it stays untouched.

``bridge.Call`` runs the root chunk by chunk; only one chunk's graph exists at a time, so a step
needs no more memory than a hand-written accumulation loop:

* *recompute*: every chunk but the last runs without a graph and is run again in backward; the
  last one's graph is kept, because backward consumes it first, and it is as large as it may be.
  Always right.
* *eager*: where the root returns the loss itself, or a loss function of torch has its output and
  the call has waited for that (``awaited``), each chunk's backward runs at once in forward
  and nothing is recomputed; the gradients are kept aside and multiplied by what comes in. Used
  while ``.grad`` is empty and nothing listens to it; else it would hold the gradients twice.

When memory runs out inside, the work is done again in smaller pieces from the inputs that were
kept, and the step ends with the same gradients. In forward nothing is lost by starting over. In
backward some parameters have received the failed chunk's gradient and others have not, so its
samples run again for the others alone (``backward(inputs=...)``); no copy of ``.grad`` is needed.
Samples that drew random numbers are not cut there: they run again with the same draws, what
autograd saves in host memory (``hosted``), and the chunks are smaller from the next call on.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autofit.exceptions import Refused
from autofit.strategies.base import Forward
from autofit.worker.harness.batch.chunked_call import Call, Unrecognized
from autofit.worker.harness.batch.ddp import Ranks
from autofit.worker.harness.batch.evaluation import Evaluation, FindValues
from autofit.worker.harness.batch.layout import (
    Batch,
    Cut,
    Join,
    Layout,
    Rule,
    cuts,
    cuts_for_keeping,
    equal_cuts,
)
from autofit.worker.harness.batch.lazy_output import Awaited, Loss, PutOff, saved_by_hooks
from autofit.worker.harness.batch.loss_scale import LossScale
from autofit.worker.harness.patching.observers import Seams
from autofit.worker.harness.torch_state.hf_cache import without_cache
from autofit.worker.harness.torch_state.module_state import once
from autofit.worker.harness.torch_state.rng import Ambient, RandomState

OnShortage = Callable[[BaseException, str, int], bool]
"""Told ``(error, phase, micro_batch)`` when memory ran out; says whether to go on smaller.

Re-raises an error that is no shortage.
"""


class VerifiedLayouts(Protocol):
    """The verified layouts of one root, as far as its chunked calls use them."""

    def verify_again(self, kind: Any, batch: Batch, shape: str) -> Layout:
        """Verify a kind of call on ``batch``, whose autograd graph has the new ``shape``.

        Raises ``Refused`` if the split does not hold on it.
        """

    def unknown_graph(
        self, kind: Any, outputs: Sequence[Any], parameters: Sequence[torch.Tensor]
    ) -> str | None:
        """Return the shape of the graph behind ``outputs``; ``None`` if it was verified."""

    def forget(self) -> None:
        """Drop all layouts: a call has contradicted one."""


NO_SAMPLES = "it holds no samples"
ANOTHER_KIND = "its autograd graph has another shape than those that were verified"


class Elastic:
    """A root that runs in chunks of at most ``micro_batch`` samples."""

    def __init__(
        self,
        module: nn.Module,
        seams: Seams,
        micro_batch: int,
        *,
        find_layout: FindValues,
        layouts: VerifiedLayouts,
        on_shortage: OnShortage,
        ranks: Ranks | None = None,
        whole_at_worst: bool = True,
    ) -> None:
        """``whole_at_worst``: a later batch that cannot be split runs in one piece."""
        self.seams = seams
        self.micro_batch = micro_batch
        self.own: list[nn.Parameter] = []
        self.parameters: list[nn.Parameter] = []
        """Those that need gradients now; the script may freeze and thaw some."""
        self.pending: weakref.WeakSet[Call] = weakref.WeakSet()
        self.one_at_a_time = ranks is None or not ranks.finds_unused
        self.loss_scale = LossScale()
        self.draws_elsewhere: bool | None = None
        self.even = False
        self.puts_off = ranks is None
        self._outlines: dict[object, tuple[torch.Tensor, torch.device]] = {}
        """Of outputs that a loss may be made of, by the kind of call."""
        self.one_size = False
        """Chunks are of one size, as far as that goes."""
        self.accumulated: set[int] = set()
        """Parameters (by ``id``) whose ``.grad`` has received the running chunk's gradient."""
        self._module = weakref.ref(module)
        self._find_layout = find_layout
        self._layouts = layouts
        self._has_split = False
        """A call has gone well."""
        self._on_shortage = on_shortage
        self._evaluation = Evaluation(find_layout, on_shortage)
        self._ranks = ranks
        self._whole_at_worst = whole_at_worst
        self._buffers: list[torch.Tensor] = []
        self._layer_hooks: list[Mapping[int, Any]] = []
        self._hooks: list[RemovableHandle] = []
        self._look_again()

    def remove(self) -> None:
        """Take our hooks off the parameters."""
        while self._hooks:
            self._hooks.pop().remove()

    def _look_again(self) -> None:
        """Find the parameters that need gradients; put our hook on each."""
        module = self._module()
        modules = list(module.modules()) if module is not None else []
        self.own = _all(each._parameters for each in modules)
        self._buffers = _all(each._buffers for each in modules)
        self._layer_hooks = [
            hooks
            for each in modules
            for hooks in (each._backward_hooks, each._backward_pre_hooks)
            if hooks
        ]
        found = [parameter for parameter in self.own if parameter.requires_grad]
        if [id(p) for p in found] != [id(p) for p in self.parameters]:
            self.remove()
            self.parameters = found
            self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in found]

    def _arrived(self, parameter: torch.Tensor) -> None:
        self.accumulated.add(id(parameter))
        if self._ranks is not None:
            self._ranks.arrived(parameter)

    def __call__(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run the root's call in chunks; outputs and gradients are those of the whole."""
        if not torch.is_grad_enabled():
            return self._around(lambda: self._evaluation(forward, args, kwargs))
        self._look_again()
        self.refuse_listeners()
        batch = Batch.of(args, without_cache(self._module(), kwargs))
        if not (self.parameters or _need_gradients(batch)):  # the script has frozen all of it
            return self._around(lambda: self._evaluation(forward, args, kwargs))
        try:
            return self._split(forward, batch)
        except Refused as refusal:
            if not self._has_split or self._ranks is not None or _is_of_another(refusal):
                raise
            if not self._whole_at_worst:
                reason = f"a later batch cannot be split: {refusal}"
                raise Refused(reason, "micro_batch") from refusal
            late = str(refusal)
        return self._whole(late, forward, args, kwargs)

    def refuse_what_a_call_would(self, args: Any, kwargs: Any) -> None:
        """Raise ``Refused`` where a call with gradients would be, before it has run."""
        self._look_again()
        self.refuse_listeners()
        batch = Batch.of(args, without_cache(self._module(), kwargs))
        if not self._layout(batch).size(batch):
            raise Refused(NO_SAMPLES)

    def _split(self, forward: Forward, batch: Batch) -> Any:
        for last in (False, True):
            layout = self._layout(batch)
            if not layout.size(batch):
                raise Refused(NO_SAMPLES)
            start = RandomState.now() if layout.draws else None
            self._watch_what_stays(layout)
            call = Call(self, once(forward, layout.moved), batch, layout)
            try:
                output = self._around(call)
            except Unrecognized as unknown:
                if last or self._ranks is not None:
                    raise Refused(ANOTHER_KIND, "micro_batch") from None
                self._layouts.verify_again(layout.kind, batch, unknown.shape)
            except Refused as refusal:  # what was proven does not hold for this batch
                if _is_of_another(refusal):
                    raise
                if start is not None:
                    start.restore()
                self._layouts.forget()
                if last or self._ranks is not None:  # the other ranks would wait for another call
                    raise
            else:
                self._has_split = True
                if self.puts_off and not call.inputs and _is_of_rows(layout, output):
                    outline = torch.empty_like(output, device="meta")
                    self._outlines[self._kind(batch)] = outline, output.device
                return output
        raise AssertionError("the second attempt returns or raises")

    def unrecognized(self, layout: Layout, outputs: Sequence[Any]) -> str | None:
        """Return the shape of a chunk's graph if it is none that was verified."""
        if layout.kind is None:
            return None
        return self._layouts.unknown_graph(layout.kind, outputs, self.own)

    def put_off(
        self,
        forward: Forward,
        args: Any,
        kwargs: Any,
        again: Callable[[Any, Any], Any],
        entered: Callable[[Callable[[], Any]], Any],
    ) -> Awaited | None:
        """Return a call's output before it has run; ``None`` where the call is to run now.

        Later calls only, of a kind that has run in chunks and whose output a loss may be made of.
        ``again``: makes the call; ``entered``: runs a part of it.
        """
        if self.seams.compiles_functions or not (self.puts_off and self._outlines):
            return None
        if torch._C._len_torch_dispatch_stack() or saved_by_hooks():  # they are for the call
            return None
        batch = Batch.of(args, without_cache(self._module(), kwargs))
        self._look_again()
        if not self.parameters:
            return None
        known = self._outlines.get(self._kind(batch))
        if known is None or self._listened() or _need_gradients(batch):
            return None
        layout = self._layout(batch)
        if len(self.cut(layout.size(batch), eager=True)) < 2:
            return None
        self._watch_what_stays(layout)
        return Awaited.of(PutOff(self, forward, batch, layout, again, entered), *known)

    def with_loss(self, call: PutOff, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a call that was put off with the loss as its last part; return loss and output."""
        layout, ambient, plain = call.layout, call.ambient, call.forward
        args, kwargs = call.batch.call(call.batch.leaves)

        def forward(target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with ambient.again():  # not the call's: it holds the output, whose graph holds this
                output = plain(*args, **kwargs)
            return loss(output, target), output

        batch = Batch.of((loss.target, *args), kwargs)

        def run(layout: Layout) -> Any:
            both = replace(
                layout,
                batched=(0, *(index + 1 for index in layout.batched)),
                joins=(loss.mean.join, *layout.joins),
            )
            return Call(self, once(forward, layout.moved), batch, both, own=1)()

        def verified() -> Any:
            try:
                return run(layout)
            except Unrecognized as unknown:
                shape = unknown.shape
            try:
                return run(self._layouts.verify_again(layout.kind, call.batch, shape))
            except Refused as refusal:
                if not self._whole_at_worst or _is_of_another(refusal):
                    raise
                return self._whole(str(refusal), forward, *batch.call(batch.leaves))

        found: tuple[torch.Tensor, torch.Tensor] = call.entered(verified)
        return found

    def _kind(self, batch: Batch) -> object:
        """Return what calls have in common whose outputs have one shape."""
        leaves = tuple(
            (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else _told(leaf)
            for leaf in batch.leaves
        )
        module = self._module()
        return leaves, batch.spec, module is not None and module.training, Ambient.now()

    def _watch_what_stays(self, layout: Layout) -> None:
        moving = {id(place.tensor()) for place in layout.moved}
        self._buffers = [each for each in self._buffers if id(each) not in moving]

    def _whole(self, reason: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run a batch in one piece that cannot be split, unlike those before it.

        Nothing has been done with it yet, so this is the script's own training.
        """
        said = f"a batch runs in one piece: {reason}"
        warnings.warn(f"autofit: {said}", stacklevel=2)
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            error.add_note(f"autofit: {said}")
            raise

    def _around(self, run: Callable[[], Any]) -> Any:
        return run() if self._ranks is None else self._ranks.forward(run)

    def finish(
        self,
        forward: Forward,
        batch: Batch,
        incoming: dict[int, torch.Tensor],
        parameters: list[nn.Parameter],
        state: RandomState,
        ambient: Ambient,
    ) -> None:
        """Bring the gradient of a call that has run elsewhere into ``.grad`` of ``parameters``.

        ``incoming``: the gradient of each output used; ``state``, ``ambient``: of that forward.
        """
        Call(self, forward, batch, self._layout(batch)).finish(incoming, parameters, state, ambient)

    def refuse_listeners(self) -> None:
        """Raise ``Refused`` where a hook of the script would see the gradient of each part."""
        if self._listened():
            reason = "a hook of the script on the gradients would see those of each part"
            raise Refused(reason, "micro_batch")

    def came_back(self) -> None:
        """Notice that a call's backward is done."""
        if self._ranks is not None:
            self._ranks.came_back()

    def _layout(self, batch: Batch) -> Layout:
        layout = self._find_layout(batch, gradients=True)
        if not layout.fits(batch):
            reason = "the model's arguments do not all have the same number of samples"
            raise Refused(reason, "micro_batch")
        return layout

    def cut(self, size: int, eager: bool) -> list[Cut]:
        """Return the chunks of a call; ``eager``: none of them is run again."""
        if self.one_size:
            return equal_cuts(size, self.micro_batch)
        return (
            cuts(0, size, self.micro_batch) if eager else cuts_for_keeping(size, self.micro_batch)
        )

    def shrink(self, error: BaseException, phase: str, size: int) -> bool:
        """Halve the chunks after memory ran out with ``size`` samples; return whether to go on."""
        if not self._on_shortage(error, phase, size):
            return False
        self.micro_batch = min(self.micro_batch, -(-size // 2))
        return True

    def held(self) -> nn.Module:
        """Return the root, which is there while it is called."""
        module = self._module()
        assert module is not None, "a root outlives its calls"
        return module

    def mark(self) -> tuple[bool, int]:
        """Return what must be the same in forward and backward: mode, versions of its tensors."""
        module = self._module()
        versions = sum(tensor._version for tensor in (*self.parameters, *self._buffers))
        return (module.training if module is not None else False), versions

    def _listened(self) -> bool:
        """Return whether a hook of the script sees the gradients of weights or of layers."""
        return any(
            not str(getattr(hook, "__module__", "")).startswith("autofit.")
            for hooks in (
                *(parameter._post_accumulate_grad_hooks for parameter in self.parameters),
                *(parameter._backward_hooks for parameter in self.parameters),
                *self._layer_hooks,
            )
            for hook in (hooks or {}).values()
        )


def _is_of_another(refusal: Refused) -> bool:
    """Return whether a strategy refuses that has nothing to do with the split."""
    return refusal.strategy not in (None, "micro_batch")


def _is_of_rows(layout: Layout, output: Any) -> bool:
    """Return whether a call's output is one plain tensor whose rows are its samples."""
    rows = layout.dim == 0 and layout.joins == (Join(Rule.CONCATENATE),)
    return rows and type(output) is torch.Tensor and output.requires_grad


def _told(argument: Any) -> object:
    """Return what tells an argument from others; of one that says nothing: no other is like it."""
    try:
        return repr(argument)
    except Exception:  # noqa: BLE001 - it is the script's own
        return object()


def _need_gradients(batch: Batch) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in batch.leaves)


def _all(each: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the tensors, each once."""
    return list({id(t): t for found in each for t in found.values() if t is not None}.values())
