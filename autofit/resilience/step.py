"""One call of a step function, for the whole batch or in parts if memory runs out. Imports torch.

Before the batch is first split, the function runs on a few samples, to verify that the losses of
parts add up (``split_of_step``). After a failed attempt, gradients and random generators are
restored. Other changes, such as to a counter, remain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from autofit.exceptions import CannotRetry, Refused, UsageError
from autofit.resilience import out_of_memory, outer_models, ranks, switches
from autofit.resilience.arguments import ArgumentPlace, Arguments, inject, take_argument
from autofit.resilience.batch import StepBatch, Weight, detached, join_outputs, loss_of
from autofit.resilience.call_key import Key, key_of
from autofit.resilience.parameters import GradientSnapshot, StepParameters
from autofit.resilience.part_limit import PartLimit
from autofit.resilience.records import Hook, Retry
from autofit.resilience.remembered import FittedSettings
from autofit.resilience.split_of_step import StepLoss
from autofit.worker.harness.batch.layout import Cut, Weights, cuts
from autofit.worker.harness.torch_state.rng import RandomState
from autofit.worker.harness.verification.split_rules import Undecided
from autofit.worker.oom.attempt import attempt, count_survived
from autofit.worker.oom.classifier import Diagnosis, ErrorKind

log = logging.getLogger("autofit.resilient")


@dataclass(kw_only=True)
class SplitStep:
    """A decorated step function, with its options and the part sizes that fitted."""

    function: Callable[..., Any]
    name: str
    place: ArgumentPlace
    dim: int
    reduction: str | Weight
    backward: Callable[[torch.Tensor], object] | None
    join: Callable[[list[Any]], Any] | None
    smallest: int
    grows: bool
    mixes_samples: bool
    """Split the batch even if the model mixes its samples, as BatchNorm does."""
    hooks: tuple[Hook, ...]
    memory: FittedSettings | None
    parameters: StepParameters = field(default_factory=StepParameters)
    limits: dict[Key, PartLimit] = field(default_factory=dict)
    loss: StepLoss | None = None
    """The loss as a function of the batch; ``None`` until the batch is split."""

    def forget(self) -> None:
        """Forget all limits: the next call runs the whole batch at once."""
        self.limits.clear()
        if self.memory is not None:
            self.memory.forget()

    def limit(self, key: Key) -> PartLimit:
        """Return the limit for batches with this key; a new limit has no bound."""
        if key not in self.limits:
            remembered = self.memory.recall(key) if self.memory else None
            known = (remembered or {}).get("samples")
            self.limits[key] = (
                PartLimit(known) if isinstance(known, int) and known > 0 else PartLimit()
            )
        return self.limits[key]


class _Run:
    """One call of a step."""

    def __init__(self, step: SplitStep, arguments: Arguments) -> None:
        self.step = step
        value, self.rest = take_argument(step.place, arguments)
        self.batch = StepBatch(value, step.dim)
        self.samples = self.batch.samples
        self.key = (*_shapes(self.batch.leaves, step.dim), *key_of(self.rest))
        self.limit = step.limit(self.key)
        self._known_limit = self.limit.samples
        self.attempt = 0
        self.random = RandomState.now(elsewhere=False)
        self.watch = out_of_memory.AllocationWatch()
        self.start: GradientSnapshot | None = None
        """The gradients before the first backward of this call."""
        self.outputs: list[Any] = []
        self.done: list[Cut] = []
        self.weights: list[float] = []
        self._failed: torch.Tensor | None = None
        self._restart = False
        """Whether the step starts over, because it started without gradients."""
        self._reached: list[nn.Module] | None = None
        self._verified: Weights | None = None
        """The weights of the samples in the loss; ``None`` where nothing is verified."""

    def output(self) -> Any:
        """Run part after part; return the output of the whole batch.

        If a part does not fit, start over or continue with smaller parts.
        """
        self._parts((0, self.samples), None, last=True)
        self.limit.succeeded(self.samples, self.step.grows)
        if self.limit.samples != self._known_limit and self.step.memory is not None:
            self.step.memory.remember(self.key, self._to_remember, is_new=True)
        if len(self.outputs) > 1 and self.step.join is not None:
            return self.step.join(self.outputs)
        return join_outputs(self.outputs, self.done, self.weights, self.step.dim)

    def _parts(self, whole: Cut, only: list[torch.Tensor] | None, *, last: bool) -> None:
        """Add the gradients of the samples ``whole`` to the parameters, or to ``only`` some.

        ``last``: these samples end the batch, so their last part reduces gradients over ranks.
        """
        waiting = self._cut(whole)
        while waiting:
            cut, final = waiting[0], last and len(waiting) == 1
            error = self._part(cut, only, last=final)
            if error is None:
                waiting.pop(0)
                continue
            missing = self._recover(error, cut, final)
            del error
            if self._restart:
                waiting = self._cut(whole)
                continue
            rest = [each for old in waiting[1:] for each in self._cut(old)]
            if missing is None:
                waiting = [*self._cut(cut), *rest]
                continue
            ids = {id(each) for each in missing}
            self._parts(
                cut, missing if only is None else [p for p in only if id(p) in ids], last=final
            )
            waiting = rest

    def _cut(self, cut: Cut) -> list[Cut]:
        return cuts(*cut, self.limit.samples) if cut[1] > cut[0] else [cut]

    # --- one part ----------------------------------------------------------------------------

    def _part(self, cut: Cut, only: list[torch.Tensor] | None, *, last: bool) -> Exception | None:
        """Run one part; return the error if memory ran out in it."""
        with ExitStack() as stack:
            if cut != (0, self.samples):
                modules = self._modules()
                for module in () if last else _reducing(modules):  # reduce once, in the last part
                    stack.enter_context(module.no_sync())
            given = inject([self.step.place], [self.batch.take(cut)], self.rest)
            try:
                value = switches.attempt(self.step.function, *given)
            except Exception as failure:
                if not self._is_shortage(failure):
                    raise
                return failure
            del given
            error = self._finish_part(value, cut, only)
            del value  # the error's traceback holds this frame, which would hold the graph
            return error

    def _finish_part(
        self, value: Any, cut: Cut, only: list[torch.Tensor] | None
    ) -> Exception | None:
        """Run backward on a part's loss and store its output; return a memory error, if any."""
        step = self.step
        loss = loss_of(value)
        weight = self._weight(cut)
        try:
            if loss.requires_grad and weight:
                step.parameters.find(loss, step.function, self._arguments())
                self.before = step.parameters.snapshot()
                if self.done and self.before.empty and self.start is not None:
                    raise UsageError(
                        f"{step.name} clears the gradients or steps the optimizer, but is called"
                        " once for each part of a batch: leave both to its caller"
                    )
                self.start = self.start or self.before
                _backward(step.backward, loss, weight, only)
        except Exception as error:
            if not self._is_shortage(error):
                raise
            self._failed = loss
            return error
        self.outputs.append(detached(value))
        self.done.append(cut)
        self.weights.append(weight)
        return None

    def _arguments(self) -> Arguments:
        return inject([self.step.place], [None], self.rest)

    def _weight(self, cut: Cut) -> float:
        reduction = self.step.reduction
        if cut == (0, self.samples):
            return 1.0
        if self._verified is not None:
            return self._verified.of(cut)
        if reduction == "sum":
            return 1.0
        if callable(reduction):
            total = float(reduction(self.batch.take((0, self.samples))))
            if total:
                return float(reduction(self.batch.take(cut))) / total
        return (cut[1] - cut[0]) / self.samples

    def _modules(self) -> list[nn.Module]:
        """Return every module that the function can reach; raise if the batch cannot be split."""
        if self._reached is None:
            found = [*outer_models.modules(self.step.function, self._arguments())]
            self._reached = [inner for module in found for inner in module.modules()]
            self._refuse_to_split(self._reached)
            self._verify(found)
        return self._reached

    def _verify(self, models: list[nn.Module]) -> None:
        """Compare the loss of a few samples with those of parts; raise if they do not add up.

        One rank alone can verify nothing. With ``mixes_samples`` the user asks for another loss.
        """
        step = self.step
        if step.mixes_samples or ranks.in_use():
            return
        models = [*{id(each): each for each in models if _trains(each)}.values()]
        if not models:
            return
        if step.loss is None or [*step.loss.models] != models:
            step.loss = StepLoss(step.function, step.place, step.dim, models)
        whole = self.batch.take((0, self.samples))
        try:
            outcome = attempt(partial(step.loss.weights, whole, self.rest))
        except Undecided as undecided:
            log.warning("%s: that parts add up is not verified: %s", step.name, undecided)
        except Refused as refusal:
            raise CannotRetry(f"{step.name} cannot be split: {refusal}") from None
        else:
            self._verified = outcome.value
            if not outcome.fits:
                log.warning("%s: memory has no room to verify that parts add up", step.name)

    def _refuse_to_split(self, modules: list[nn.Module]) -> None:
        mixing = (m for m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm))
        if not self.step.mixes_samples and any(module.training for module in mixing):
            raise CannotRetry(
                f"{self.step.name}: BatchNorm in training mode would compute its statistics over"
                " parts of the batch; give mixes_samples=True to split it anyway"
            )
        if ranks.in_use() and any(ranks.communicates(module) for module in modules):
            raise CannotRetry(
                f"{self.step.name}: the ranks communicate in the model's forward (FSDP, tensors"
                " spread over a mesh, SyncBatchNorm), so one rank cannot split its batch alone;"
                " decorate the whole training with @autofit.resilient(batch_size=...)"
            )

    # --- after a failure -----------------------------------------------------------------------

    def _is_shortage(self, error: Exception) -> bool:
        self.found: Diagnosis = out_of_memory.diagnose(error, self.watch)
        return self.found.kind is ErrorKind.OOM

    def _recover(self, error: Exception, cut: Cut, last: bool) -> list[torch.Tensor] | None:
        """Free the memory of the failed part and lower the limit.

        ``last``: the ranks reduce their gradients in this part. Returns the parameters that have
        not received the part's gradient; ``None`` if the whole part is to run again. Raises if no
        smaller part is possible, or if the part cannot be undone.
        """
        received = self._failed is not None
        unknown = self._failed is not None and self.step.parameters.missed(self._failed)
        self._failed = None
        out_of_memory.free_memory(error)
        self.attempt += 1
        part = cut[1] - cut[0]
        if part <= self.step.smallest or not self.limit.failed(part):
            error.add_note(f"autofit: {self.step.name} ran out of memory with {part} samples")
            raise error
        self.limit.samples = max(self.limit.samples, self.step.smallest)
        self._restart = self.start is None or self.start.empty
        self._check_ranks(error, last)
        if unknown:
            raise CannotRetry(
                self._cannot_tell("parameters that it had not used before")
            ) from error
        if self._restart:
            self._begin_again()
        elif received and self.step.backward is not None:
            raise CannotRetry(self._cannot_tell("a backward= of its own")) from error
        self._report(part)
        return self.before.missing() if received and not self._restart else None

    def _check_ranks(self, error: Exception, last: bool) -> None:
        """Raise if the batch cannot be split, or the ranks have begun to reduce gradients."""
        try:
            modules = self._modules()
        except CannotRetry as refusal:
            raise refusal from error
        if last and ranks.in_use() and _reducing(modules):
            if self.step.memory is not None:
                self.step.memory.remember(self.key, self._to_remember, is_new=True, this_rank=True)
            raise CannotRetry(
                f"{self.step.name} ran out of memory while DistributedDataParallel reduced the"
                " gradients, which cannot be undone on the other ranks: start the training again;"
                f" it then takes {self.limit.samples} samples at a time"
            ) from error

    def _begin_again(self) -> None:
        if self.start is not None:
            self.start.clear()
        self.start = None
        self.outputs, self.done, self.weights = [], [], []
        self.random.restore()

    def _cannot_tell(self, what: str) -> str:
        return (
            f"{self.step.name} ran out of memory in backward with {what}, so autofit cannot tell"
            " which gradients were added; call it with empty gradients, or with smaller batches"
        )

    def _report(self, part: int) -> None:
        record = Retry(
            function=self.step.name,
            attempt=self.attempt,
            tried=f"{part} samples at a time",
            next=f"{self.limit.samples} samples at a time",
            message=self.found.message,
            requested=self.found.requested,
            memory=out_of_memory.tensor_bytes(),
        )
        log.warning(
            "%s: out of memory with %s; goes on with %s", record.function, record.tried, record.next
        )
        count_survived()
        for hook in (*switches.hooks(), *self.step.hooks):
            hook(record)

    @property
    def _to_remember(self) -> dict[str, int]:
        return {"samples": self.limit.samples}


def _trains(module: nn.Module) -> bool:
    """Return whether a module has parameters that get gradients."""
    return any(parameter.requires_grad for parameter in module.parameters())


def _reducing(modules: list[nn.Module]) -> list[nn.parallel.DistributedDataParallel]:
    """Return the modules that reduce the gradients of this step over the ranks."""
    kinds = nn.parallel.DistributedDataParallel
    return [m for m in modules if isinstance(m, kinds) and m.require_backward_grad_sync]


def _shapes(leaves: list[Any], dim: int) -> Key:
    """Return the shapes and dtypes of a batch, without the number of samples."""
    return tuple(
        (*leaf.shape[:dim], *leaf.shape[dim + 1 :], leaf.dtype)
        if isinstance(leaf, torch.Tensor)
        else type(leaf).__name__
        for leaf in leaves
    )


def _backward(
    own: Callable[[torch.Tensor], object] | None,
    loss: torch.Tensor,
    weight: float,
    only: list[torch.Tensor] | None,
) -> None:
    """Add ``weight`` times the gradient of ``loss`` to ``.grad``, only of ``only`` if given."""
    if own is not None:
        own(loss * weight if weight != 1.0 else loss)
    elif only != []:
        gradient = None if weight == 1.0 else torch.full_like(loss, weight)
        torch.autograd.backward(loss, gradient, inputs=only)


def run(step: SplitStep, arguments: Arguments) -> Any:
    """Run the step, in parts if memory runs out; return its output for the whole batch."""
    if switches.active():
        return _Run(step, arguments).output()
    args, kwargs = arguments
    value = step.function(*args, **kwargs)
    loss = loss_of(value)
    if loss.requires_grad:
        _backward(step.backward, loss, 1.0, None)
    return detached(value)
