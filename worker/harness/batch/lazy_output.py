"""A root's output that is not there yet: it waits for the loss that the script makes of it.

Where a batch runs in chunks and its loss is computed outside the model, each chunk would run twice:
once for its output, and again in backward, when the output's gradient has come. Most scripts give
the output to a loss function of torch and to nothing else before. So the call is put off until
then, and runs with the loss as its last part: each chunk's backward comes at once, as where a model
returns its loss (``bridge``). Whatever else a script does with the output first makes it be there,
as if it had never waited; from then on no call of this root is put off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from autofit.exceptions import Refused
from autofit.strategies.base import Forward
from autofit.worker.harness.batch import loss_functions
from autofit.worker.harness.batch.layout import Batch, Layout
from autofit.worker.harness.patching.observers import plain_backward
from autofit.worker.harness.torch_state.rng import Ambient, RandomState

CHANGED = "the model or its arguments changed between its call and the use of its output"
LATE = "the script asks for the gradient of the model's output after it has made the loss"
UNLIKE = "the same arguments give an output of another shape or type than before"
TENSOR = torch.Tensor
TOLD: set[Any] = {
    TENSOR.__hash__,
    TENSOR.__len__,
    TENSOR.device.__get__,
    TENSOR.dim,
    TENSOR.dtype.__get__,  # type: ignore[attr-defined]
    TENSOR.is_cuda.__get__,  # type: ignore[attr-defined]
    TENSOR.is_floating_point,
    TENSOR.ndim.__get__,  # type: ignore[attr-defined]
    TENSOR.nelement,
    TENSOR.numel,
    TENSOR.requires_grad.__get__,  # type: ignore[attr-defined]
    TENSOR.shape.__get__,  # type: ignore[attr-defined]
    TENSOR.size,
    torch.is_floating_point,
    torch.numel,
}
"""What can be said of an output that is not there."""
SHAPED: set[Any] = {
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
"""What scripts do to an output before they give it to a loss function."""
SIZED: set[Any] = {TENSOR.view, TENSOR.reshape, torch.reshape}
"""Those of them that may name how many rows there are."""

LISTENING: set[Any] = {TENSOR.register_hook, TENSOR.retain_grad}
"""What waits for the gradient of an output: none comes if the loss has run with the call."""

Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Loss:
    """A call of a loss function with a root's output."""

    function: Callable[..., Any]
    given: Mapping[str, Any]
    steps: tuple[Step, ...]
    """From the root's output to the function's input."""
    target: torch.Tensor
    """``(samples, ...)``."""
    flat: bool
    """The function has several rows for a sample; in ``target`` they have a dimension."""
    mean: loss_functions.Mean

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of some samples."""
        target = target.flatten(0, 1) if self.flat else target
        mine = {"input": _after(self.steps, output), "target": target}
        found: torch.Tensor = self.function(
            **{**self.given, **mine, "reduction": self.mean.reduction}
        )
        return found if self.mean.over is None else (found / self.mean.over).to(found.dtype)


class Caller(Protocol):
    """Runs what was put off (``elastic.Elastic``)."""

    puts_off: bool
    """Calls may be put off."""

    def mark(self) -> object:
        """What must be the same when the call runs: the root's mode, weights and buffers."""

    def with_loss(self, call: PutOff, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the call with the loss as its last part; return the loss, and the output."""


class PutOff:
    """One call of a root that has not run."""

    waiting: WeakSet[PutOff] = WeakSet()

    def __init__(
        self,
        caller: Caller,
        forward: Forward,
        batch: Batch,
        layout: Layout,
        again: Callable[[Any, Any], torch.Tensor],
        entered: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """``again``: makes the call, with such arguments, as if none were ever put off.

        ``entered``: runs a part of it.
        """
        self.forward = forward
        self.batch = batch
        self.layout = layout
        self.samples = layout.size(batch)
        self.entered = entered
        self.ambient = Ambient.now()
        self._caller = caller
        self._again = again
        self._mark = self._now()
        self._output: torch.Tensor | None = None
        self.with_loss = False
        """It has run with its loss, which does not come from the output then."""
        self.told: torch.Tensor | None = None
        """What the script was told the output is like."""
        PutOff.waiting.add(self)

    @classmethod
    def hurry(cls) -> None:
        """Let every output be there: what it is made of is about to change."""
        for call in list(cls.waiting):
            with suppress(Refused):  # that is said when it is used, if it ever is
                call.output()

    def output(self) -> torch.Tensor:
        """Return the output, computed now if need be; raise ``Refused`` where that is too late."""
        if self._output is None:
            self._caller.puts_off = False
            self._check()
            start = RandomState.now()
            try:
                with _as_it_was(), self.ambient.again():
                    # not with the script's own containers: it may have changed them since
                    self._is_there(self._again(*self.batch.call(self.batch.leaves)))
            except BaseException:  # it may be made again
                start.restore()
                raise
        assert self._output is not None
        return self._output

    def loss(self, loss: Loss) -> torch.Tensor | None:
        """Return the loss, run with the call; ``None`` where the output has to be there first."""
        if self._output is not None or not torch.is_grad_enabled() or saved_by_hooks():
            return None
        self._check()
        start = RandomState.now()
        try:
            found, output = self._caller.with_loss(self, loss)
        except Exception:  # noqa: BLE001 - the call meets it again as ever, where it is answered
            start.restore()
            return None
        self._is_there(output)
        self.with_loss = True
        return found

    def _is_there(self, output: torch.Tensor) -> None:
        """Keep the output, and nothing that is only needed to make it."""
        told = self.told
        if told is not None and (told.shape, told.dtype) != (output.shape, output.dtype):
            self._caller.puts_off = False
            raise Refused(UNLIKE, "micro_batch")
        self._output = output
        self.batch = Batch([], self.batch.spec)
        self._again = lambda *_: output
        PutOff.waiting.discard(self)

    def _check(self) -> None:
        if self._now() != self._mark:
            raise Refused(CHANGED, "micro_batch")

    def _now(self) -> object:
        tensors = [leaf for leaf in self.batch.leaves if isinstance(leaf, torch.Tensor)]
        return self._caller.mark(), [each._version for each in tensors if not each.is_inference()]


class Awaited(torch.Tensor):
    """Such an output, or a view of it, in the script's hands."""

    _call: PutOff
    _steps: tuple[Step, ...]
    _value: torch.Tensor | None

    @classmethod
    def of(
        cls,
        call: PutOff,
        like: torch.Tensor,
        device: torch.device,
        steps: tuple[Step, ...] = (),
    ) -> Awaited:
        """Return what will be as ``like``, which may be an outline, on ``device``."""
        if not steps:
            call.told = like
        anchor = torch.empty(0, requires_grad=True)
        made: Awaited = _Source.apply(anchor, call, like, device, steps)  # type: ignore[no-untyped-call]
        made._call, made._steps, made._value = call, steps, None
        return made

    def value(self) -> torch.Tensor:
        """Return the tensor it stands for, with its graph."""
        if self._value is None:
            self._value = _after(self._steps, self._call.output())
        return self._value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what can be answered, put a view off too, run the loss; else be there."""
        kwargs = kwargs or {}
        if func in TOLD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found: torch.Tensor | None = None
        if func in SHAPED and isinstance(args[0], Awaited):
            found = args[0]._shaped(func, args[1:], kwargs)
        elif func in loss_functions.LOSSES:
            found = _loss(func, args, kwargs)
        if found is not None:
            return found
        if func in LISTENING:
            refuse_late((args, kwargs))
        args, kwargs = there((tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Be there for what does not come through Python; gradients go back to the source."""
        args, kwargs = tree_map(
            lambda each: each.value().detach() if isinstance(each, Awaited) else each,
            (tuple(args), kwargs or {}),
        )
        return func(*args, **kwargs)

    def _shaped(self, func: Any, others: Sequence[Any], kwargs: dict[str, Any]) -> Awaited | None:
        """Return a view that waits too; ``None`` unless each sample keeps its rows in it."""
        if self._value is not None or _hold((others, kwargs), torch.Tensor):
            return None
        try:
            like = func(self._outline(1), *others, **kwargs)
            if not like.is_meta or not like.ndim or len(like) % self._call.samples:
                return None
            if func in SIZED and like.dtype is not self.dtype:
                return None
            rest = like.shape[1:]
            if func not in SIZED:
                twice = func(self._outline(2), *others, **kwargs).shape
                if twice != (2 * len(like), *rest):
                    return None
        except Exception:  # noqa: BLE001 - as the tensor itself will say
            return None

        def step(part: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = part if func in SIZED else func(part, *others, **kwargs)
            return made.reshape(-1, *rest)

        return Awaited.of(self._call, like, self.device, (*self._steps, step))

    def _outline(self, times: int) -> torch.Tensor:
        """Return the shape of so many times its rows, without memory."""
        shape = (times * len(self), *self.shape[1:])
        return torch.empty(shape, dtype=self.dtype, device="meta")


class _Source(torch.autograd.Function):
    """Where a waiting output comes from, for what reaches it past Python: its own graph."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        call: PutOff,
        like: torch.Tensor,
        device: torch.device,
        steps: tuple[Step, ...],
    ) -> Awaited:
        ctx.call, ctx.steps = call, steps
        made: Awaited = torch.Tensor._make_wrapper_subclass(
            Awaited, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        return made

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        output = _after(ctx.steps, ctx.call.output())
        plain_backward([output], list(cotangents), retain_graph=True)  # it may come again
        return None, None, None, None, None


def saved_by_hooks() -> bool:
    """Return whether what autograd saves here goes through hooks of the script's own."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Compute as where a call was put off: with gradients, and without hooks on what is saved."""
    plain = saved_tensors_hooks(_itself, _itself) if saved_by_hooks() else nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), plain:
        yield


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def there(value: Any) -> Any:
    """Return ``value`` with the tensors that outputs in it stand for."""
    return tree_map(lambda each: each.value() if isinstance(each, Awaited) else each, value)


def refuse_late(value: Any) -> None:
    """Raise ``Refused`` where the gradient is asked for of an output that no loss comes from."""
    leaves = tree_leaves(value)
    if any(isinstance(leaf, Awaited) and leaf._call.with_loss for leaf in leaves):
        raise Refused(LATE, "micro_batch")


def _loss(func: Callable[..., Any], args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return the loss, run with the call it is made of; ``None`` where that cannot be."""
    try:
        found = _understood(func, args, kwargs)
    except Exception:  # noqa: BLE001 - as the function itself will say
        return None
    return None if found is None else found[0].loss(found[1])


def _understood(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[PutOff, Loss] | None:
    """Return what is to run for a loss: the call that was put off, and the loss as a part of it."""
    given = loss_functions.arguments(func, args, kwargs)
    output, target = given.pop("input"), given.pop("target")
    if func in loss_functions.OF_DISTANCES and isinstance(target, Awaited):
        output, target = target, output
    if not isinstance(output, Awaited) or _hold((target, given), Awaited):
        return None
    if not isinstance(target, torch.Tensor) or target.requires_grad or not target.ndim:
        return None
    if len(target) != len(output) or target.device != output.device or _overflows(output):
        return None
    mean = loss_functions.mean(func, {**given, "target": target}, output)
    if mean is None:
        return None
    call = output._call
    flat = len(output) != call.samples
    target = target.unflatten(0, (call.samples, -1)) if flat else target
    return call, Loss(func, given, output._steps, target, flat, mean)


def _after(steps: Sequence[Step], output: torch.Tensor) -> torch.Tensor:
    for step in steps:
        output = step(output)
    return output


def _overflows(output: torch.Tensor) -> bool:
    """Return whether a sum of losses may be too large: in float16, where autocast does not help."""
    kind = output.device.type
    return output.dtype is torch.float16 and not torch.is_autocast_enabled(kind)


def _hold(value: Any, kind: type[torch.Tensor]) -> bool:
    return any(isinstance(leaf, kind) for leaf in tree_leaves(value))
