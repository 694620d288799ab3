"""Delays a root's call until the script computes the loss from its output.

If the loss is computed outside the model, each chunk would run twice: once for its output, and
again in backward, when the output's gradient is known. Most scripts pass the output directly to a
loss function of torch. So the call returns a ``LazyOutput`` and runs together with the loss
function. Each chunk's backward then runs right after its forward, as if the model returned the
loss (``chunked_call``). If the script uses the output in another way first, the call runs at once,
and no later call of this root is delayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from autofit.exceptions import Refused
from autofit.strategies import SPLIT
from autofit.strategies.base import Forward
from autofit.worker.harness.batch import loss_functions
from autofit.worker.harness.batch.call_state import CallState
from autofit.worker.harness.batch.late_output import CHANGED, METADATA, LateOutput
from autofit.worker.harness.batch.layout import Batch, Layout
from autofit.worker.harness.patching.observers import Seams, plain_backward
from autofit.worker.harness.torch_state.delayed_output import DelayedOutput, materialize
from autofit.worker.harness.torch_state.rng import Ambient, RandomState

TOO_LATE = "the script asks for the gradient of the model's output after computing the loss"
OTHER_OUTPUT = "the same arguments now give an output of another shape or data type"
TENSOR = torch.Tensor
RESHAPING: set[Any] = {
    TENSOR.__getitem__,
    TENSOR.contiguous,
    TENSOR.flatten,
    TENSOR.float,
    TENSOR.permute,
    TENSOR.reshape,
    TENSOR.squeeze,
    TENSOR.to,
    TENSOR.transpose,
    TENSOR.unsqueeze,
    TENSOR.view,
    torch.flatten,
    torch.permute,
    torch.reshape,
    torch.squeeze,
    torch.transpose,
    torch.unsqueeze,
}
"""Functions that scripts apply to an output before the loss function."""
RESIZING: set[Any] = {TENSOR.view, TENSOR.reshape, torch.reshape}
"""The functions among them whose arguments may contain the number of rows."""

NEEDS_GRADIENT: set[Any] = {TENSOR.register_hook, TENSOR.retain_grad}
"""Functions that need the output's own gradient, which does not exist if the loss has run."""

Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Loss:
    """A call of a loss function on a root's output."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    steps: tuple[Step, ...]
    """The functions from the root's output to the loss function's input."""
    target: torch.Tensor
    """``(samples, ...)``."""
    flat: bool
    """The function gets several rows a sample; ``target`` has an extra dimension for them."""
    reduction: loss_functions.Reduction

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of some samples, as their share in the loss of the batch."""
        target = target.flatten(0, 1) if self.flat else target
        reduction = self.reduction
        loss: torch.Tensor = self.function(
            **{
                **self.arguments,
                "input": _apply(self.steps, output),
                "target": target,
                "reduction": reduction.name,
            }
        )
        divisor = reduction.divisor
        return loss if divisor is None else (loss / divisor).to(loss.dtype)


class Caller(Protocol):
    """What a delayed call needs of its root (``chunked_root.ChunkedRoot``)."""

    state: CallState
    seams: Seams

    def state_version(self) -> object:
        """Return a value that changes with the root's mode, weights or buffers."""

    def run_with_loss(self, call: DelayedCall, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the call with the loss as its last operation; return the loss and the output."""


class DelayedCall:
    """A call of a root that runs when its output is used."""

    def __init__(
        self,
        caller: Caller,
        forward: Forward,
        batch: Batch,
        layout: Layout,
        run: Callable[[Any, Any], torch.Tensor],
        enter: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``run(args, kwargs)`` runs the call at once; ``enter()`` is a context in the root."""
        self.forward = forward
        self.batch = batch
        self.layout = layout
        self.samples = layout.size(batch)
        self.enter = enter
        self.ambient = Ambient.now()
        self._caller = caller
        self._run = run
        self._version_at_call = self._version()
        self._output: torch.Tensor | None = None
        self.ran_with_loss = False
        """It has run with its loss, so the loss's graph does not contain the output."""
        self._promised: torch.Tensor | None = None
        """A tensor with the shape and data type that the script has seen of the output."""

    def promise(self, like: torch.Tensor) -> None:
        """Record that the script takes the output to have the shape and data type of ``like``."""
        self._promised = like

    def run_before_change(self) -> None:
        """Compute the output, because the model is about to change."""
        with suppress(Refused):  # raised again if the script uses the output
            self.output()

    def output(self) -> torch.Tensor:
        """Return the output; run the call now if it has not run.

        Raises ``Refused`` if the model or the arguments have changed since the call.
        """
        if self._output is None:
            self._caller.state.stop_delaying()
            self._check()
            start = RandomState.now()
            try:
                with _call_context(), self.ambient.again():
                    # a new container: the script may have changed its own
                    self._finish(self._run(*self.batch.call(self.batch.leaves)))
            except BaseException:  # the call may run again
                start.restore()
                raise
        assert self._output is not None
        if isinstance(self._output, LateOutput):
            self._output = self._output.value()
        return self._output

    def loss(self, loss: Loss) -> torch.Tensor | None:
        """Run the call with ``loss``; return ``None`` if the output must be computed by itself."""
        if self._output is not None or not torch.is_grad_enabled() or saved_by_hooks():
            return None
        self._check()
        start = RandomState.now()
        try:
            found, output = self._caller.run_with_loss(self, loss)
        except Exception:  # noqa: BLE001 - the call by itself raises it again
            start.restore()
            return None
        self._finish(output)
        self.ran_with_loss = True
        return found

    def _finish(self, output: torch.Tensor) -> None:
        """Store the output; free what was needed to compute it."""
        like = self._promised
        if like is not None and (like.shape, like.dtype) != (output.shape, output.dtype):
            self._caller.state.stop_delaying()
            raise Refused(OTHER_OUTPUT, SPLIT)
        self._output = output
        self.batch = Batch([], self.batch.spec)
        self._run = lambda *_: output
        self._caller.seams.delayed_calls.discard(self)

    def _check(self) -> None:
        if self._version() != self._version_at_call:
            raise Refused(CHANGED, SPLIT)

    def _version(self) -> object:
        tensors = [leaf for leaf in self.batch.leaves if isinstance(leaf, torch.Tensor)]
        return self._caller.state_version(), [
            each._version for each in tensors if not each.is_inference()
        ]


class LazyOutput(DelayedOutput):
    """The output of a delayed call, or a view of it."""

    _call: DelayedCall
    _steps: tuple[Step, ...]
    _value: torch.Tensor | None

    @classmethod
    def of(
        cls,
        call: DelayedCall,
        like: torch.Tensor,
        device: torch.device,
        steps: tuple[Step, ...] = (),
    ) -> LazyOutput:
        """Return a lazy output on ``device`` with the shape and data type of ``like``.

        ``like`` may be a meta tensor. ``steps``: the functions from the root's output to this view.
        """
        if not steps:
            call.promise(like)
        anchor = torch.empty(0, requires_grad=True)
        made: LazyOutput = _Source.apply(anchor, call, like, device, steps)  # type: ignore[no-untyped-call]
        made._call, made._steps, made._value = call, steps, None
        return made

    def value(self) -> torch.Tensor:
        """Return the actual tensor, with its graph."""
        if self._value is None:
            self._value = _apply(self._steps, self._call.output())
        return self._value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer metadata, delay a view, run the loss; compute the output for anything else."""
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found: torch.Tensor | None = None
        if func in RESHAPING and isinstance(args[0], LazyOutput):
            found = args[0]._view(func, args[1:], kwargs)
        elif func in loss_functions.LOSSES:
            found = _run_loss(func, args, kwargs)
        if found is not None:
            return found
        if func in NEEDS_GRADIENT:
            refuse_gradient((args, kwargs))
        args, kwargs = materialize((tuple(args), kwargs))
        return func(*args, **kwargs)

    def _view(self, func: Any, others: Sequence[Any], kwargs: dict[str, Any]) -> LazyOutput | None:
        """Return a lazy view; ``None`` unless each sample has rows of its own in it."""
        if self._value is not None or _contains((others, kwargs), torch.Tensor):
            return None
        try:
            like = func(self._outline(1), *others, **kwargs)
            if not like.is_meta or not like.ndim or len(like) % self._call.samples:
                return None
            if func in RESIZING and like.dtype is not self.dtype:
                return None
            rest = like.shape[1:]
            if func not in RESIZING:
                twice = func(self._outline(2), *others, **kwargs).shape
                if twice != (2 * len(like), *rest):
                    return None
        except Exception:  # noqa: BLE001 - the tensor itself raises it
            return None

        def step(part: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = part if func in RESIZING else func(part, *others, **kwargs)
            return made.reshape(-1, *rest)

        return LazyOutput.of(self._call, like, self.device, (*self._steps, step))

    def _outline(self, times: int) -> torch.Tensor:
        """Return a meta tensor with ``times`` as many rows."""
        shape = (times * len(self), *self.shape[1:])
        return torch.empty(shape, dtype=self.dtype, device="meta")


class _Source(torch.autograd.Function):
    """The autograd node of a lazy output, for gradients of calls that bypass Python."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        call: DelayedCall,
        like: torch.Tensor,
        device: torch.device,
        steps: tuple[Step, ...],
    ) -> LazyOutput:
        ctx.call, ctx.steps = call, steps
        made: LazyOutput = torch.Tensor._make_wrapper_subclass(
            LazyOutput, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        return made

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        output = _apply(ctx.steps, ctx.call.output())
        plain_backward([output], list(cotangents), retain_graph=True)  # backward may run again
        return None, None, None, None, None


def saved_by_hooks() -> bool:
    """Return whether the script has hooks on the tensors that autograd saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextmanager
def _call_context() -> Iterator[None]:
    """Compute with gradients and without saved-tensor hooks, as at the time of the call."""
    plain = saved_tensors_hooks(*[lambda tensor: tensor] * 2) if saved_by_hooks() else nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), plain:
        yield


def refuse_gradient(value: Any) -> None:
    """Raise ``Refused`` if ``value`` contains an output whose call has run with its loss.

    The loss's graph does not contain that output, so it gets no gradient.
    """
    leaves = tree_leaves(value)
    if any(isinstance(leaf, LazyOutput) and leaf._call.ran_with_loss for leaf in leaves):
        raise Refused(TOO_LATE, SPLIT)


def _run_loss(func: Callable[..., Any], args: Any, kwargs: Any) -> torch.Tensor | None:
    """Run the loss with its delayed call; return ``None`` if that is not possible."""
    try:
        found = _parse(func, args, kwargs)
    except Exception:  # noqa: BLE001 - the loss function itself raises it
        return None
    return None if found is None else found[0].loss(found[1])


def _parse(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[DelayedCall, Loss] | None:
    """Return the delayed call and the loss to run with it; ``None`` if they cannot run together."""
    given = loss_functions.arguments(func, args, kwargs)
    output, target = given.pop("input"), given.pop("target")
    if func in loss_functions.DISTANCE_LOSSES and isinstance(target, LazyOutput):
        output, target = target, output
    if not isinstance(output, LazyOutput) or _contains((target, given), LazyOutput):
        return None
    if not isinstance(target, torch.Tensor) or target.requires_grad or not target.ndim:
        return None
    if len(target) != len(output) or target.device != output.device:
        return None
    if output.dtype is torch.float16 and not torch.is_autocast_enabled(output.device.type):
        return None  # a sum of losses may overflow
    reduction = loss_functions.reduction_of(func, {**given, "target": target}, output)
    if reduction is None:
        return None
    call = output._call
    flat = len(output) != call.samples
    target = target.unflatten(0, (call.samples, -1)) if flat else target
    return call, Loss(func, given, output._steps, target, flat, reduction)


def _apply(steps: Sequence[Step], output: torch.Tensor) -> torch.Tensor:
    for step in steps:
        output = step(output)
    return output


def _contains(value: Any, kind: type[torch.Tensor]) -> bool:
    return any(isinstance(leaf, kind) for leaf in tree_leaves(value))
