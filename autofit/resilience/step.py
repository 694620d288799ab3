"""One call of a step function: in one piece, or in parts when memory runs out. Imports torch.

The work is a generator: it yields what the function is to be given, and which errors it answers;
it is sent what came of it. So functions and coroutine functions share it.

The function is called for parts of the batch alone, never to check anything. A failed attempt is
taken back in gradients and generators; what else the function changes (a counter, a list) stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autofit.exceptions import CannotRetry, UsageError
from autofit.resilience import out_of_memory, outer_models, ranks, switches
from autofit.resilience.arguments import Arguments, Place, inject, taken
from autofit.resilience.batch import Batch, Cut, Weight, detached, joined, loss_of
from autofit.resilience.call_key import Key, key_of
from autofit.resilience.parameters import Gradients, StepParameters
from autofit.resilience.part_limit import Limit
from autofit.resilience.records import Hook, Retry
from autofit.resilience.remembered import Memory
from autofit.worker.harness.batch.layout import cuts
from autofit.worker.harness.torch_state.rng import RandomState
from autofit.worker.oom.classifier import Diagnosis, Kind

log = logging.getLogger("autofit.resilient")

Outcome = list[Any]
"""``[value, error]``: emptied by whoever takes it, so that nobody holds a graph."""
Answers = Callable[[Exception], bool]
"""Whether an error is one of memory; every other is raised again where it is caught."""
Work = Generator[tuple[Arguments, Answers], Outcome, Any]


@dataclass(kw_only=True)
class Step:
    """A decorated step function, and what it has learned."""

    function: Callable[..., Any]
    name: str
    place: Place
    dim: int
    reduction: str | Weight
    backward: Callable[[torch.Tensor], object] | None
    join: Callable[[list[Any]], Any] | None
    smallest: int
    grows: bool
    mixes_samples: bool
    """Split even where the model looks at the batch as a whole (BatchNorm)."""
    hooks: tuple[Hook, ...]
    memory: Memory | None
    parameters: StepParameters = field(default_factory=StepParameters)
    limits: dict[Key, Limit] = field(default_factory=dict)

    def forget(self) -> None:
        """Take every batch in one piece again."""
        self.limits.clear()
        if self.memory is not None:
            self.memory.forget()

    def off(self, arguments: Arguments) -> Work:
        """Run it in one piece."""
        value, _ = yield arguments, lambda error: False
        loss = loss_of(value)
        if loss.requires_grad:
            _backward(self.backward, loss, 1.0, None)
        return detached(value)

    def work(self, arguments: Arguments) -> Work:
        """Run it, in parts if need be."""
        if not switches.active():
            return (yield from self.off(arguments))
        return (yield from _Run(self, arguments).work())

    def limit(self, key: Key) -> Limit:
        """Return the limit for such batches; none where nothing is known."""
        if key not in self.limits:
            kept = self.memory.recall(key) if self.memory else None
            known = (kept or {}).get("samples")
            self.limits[key] = Limit(known) if isinstance(known, int) and known > 0 else Limit()
        return self.limits[key]


class _Run:
    """One call of a step."""

    def __init__(self, step: Step, arguments: Arguments) -> None:
        self.step = step
        value, self.rest = taken(step.place, arguments)
        self.batch = Batch.of(value, step.dim)
        self.samples = self.batch.samples
        self.key = (*_shapes(self.batch), *key_of(self.rest))
        self.limit = step.limit(self.key)
        self._bound = self.limit.samples
        self.attempt = 0
        self.random = RandomState.now(elsewhere=False)
        self.witness = out_of_memory.Witness()
        self.start: Gradients | None = None
        """The gradients before the first backward of this call."""
        self.outputs: list[Any] = []
        self.done: list[Cut] = []
        self.weights: list[float] = []
        self._failed: torch.Tensor | None = None
        self._again = False
        """The failed part has left nothing: the step begins again."""
        self._reached: list[nn.Module] | None = None

    def work(self) -> Work:
        """Take part after part; begin again, or go on smaller, when one does not fit."""
        yield from self._parts((0, self.samples), None, last=True)
        self._held()
        if len(self.outputs) > 1 and self.step.join is not None:
            return self.step.join(self.outputs)
        return joined(self.outputs, self.done, self.weights, self.step.dim)

    def _parts(self, whole: Cut, only: list[torch.Tensor] | None, *, last: bool) -> Work:
        """Bring the gradients of some samples to the parameters: to ``only`` some, if given."""
        waiting = self._cut(whole)
        while waiting:
            cut, final = waiting[0], last and len(waiting) == 1
            error = yield from self._part(cut, only, last=final)
            if error is None:
                waiting.pop(0)
                continue
            missing = self._recover(error, cut, final)
            del error
            if self._again:
                waiting = self._cut(whole)
                continue
            rest = [each for old in waiting[1:] for each in self._cut(old)]
            if missing is None:
                waiting = [*self._cut(cut), *rest]
                continue
            ids = {id(each) for each in missing}
            yield from self._parts(
                cut, missing if only is None else [p for p in only if id(p) in ids], last=final
            )
            waiting = rest

    def _cut(self, cut: Cut) -> list[Cut]:
        return cuts(*cut, self.limit.samples) if cut[1] > cut[0] else [cut]

    # --- one part ----------------------------------------------------------------------------

    def _part(self, cut: Cut, only: list[torch.Tensor] | None, *, last: bool) -> Work:
        """Run one part; return the error if memory ran out in it."""
        with ExitStack() as stack:
            if cut != (0, self.samples):
                modules = self._modules()
                for module in () if last else _reducing(modules):  # once, with the last part
                    stack.enter_context(module.no_sync())
            given = inject([self.step.place], [self.batch.take(cut)], self.rest)
            outcome = yield given, self._short
            del given
            value, error = outcome
            outcome.clear()
            if error is None:
                error = self._take(value, cut, only)
            del value  # the traceback leads to this frame, and that to the graph
            return error

    def _take(self, value: Any, cut: Cut, only: list[torch.Tensor] | None) -> Exception | None:
        """Differentiate a part's loss and keep its output; return the error, if there is one."""
        step = self.step
        loss = loss_of(value)
        weight = self._weight(cut)
        try:
            if loss.requires_grad and weight:
                step.parameters.learn(loss, step.function, self._whole())
                self.before = step.parameters.now()
                if self.done and self.before.empty and self.start is not None:
                    raise UsageError(
                        f"{step.name} empties the gradients or steps: leave both to its caller,"
                        " for it is called once for each part of a batch"
                    )
                self.start = self.start or self.before
                _backward(step.backward, loss, weight, only)
        except Exception as error:
            if not self._short(error):
                raise
            self._failed = loss
            return error
        self.outputs.append(detached(value))
        self.done.append(cut)
        self.weights.append(weight)
        return None

    def _whole(self) -> Arguments:
        return inject([self.step.place], [None], self.rest)

    def _weight(self, cut: Cut) -> float:
        reduction = self.step.reduction
        if cut == (0, self.samples) or reduction == "sum":
            return 1.0
        if callable(reduction):
            total = float(reduction(self.batch.take((0, self.samples))))
            return float(reduction(self.batch.take(cut))) / total if total else 0.0
        return (cut[1] - cut[0]) / self.samples

    def _modules(self) -> list[nn.Module]:
        """Return every module the function can reach, found when the batch is first split."""
        if self._reached is None:
            found = outer_models.modules(self.step.function, self._whole())
            self._reached = [inner for module in found for inner in module.modules()]
            self._refuse_to_split(self._reached)
        return self._reached

    def _refuse_to_split(self, modules: list[nn.Module]) -> None:
        mixing = (m for m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm))
        if not self.step.mixes_samples and any(module.training for module in mixing):
            raise CannotRetry(
                f"{self.step.name}: BatchNorm in training mode sees the whole batch, and other"
                " statistics in its parts; give mixes_samples=True to split all the same"
            )
        if ranks.in_use() and any(ranks.communicates(module) for module in modules):
            raise CannotRetry(
                f"{self.step.name}: the ranks communicate in the model's forward (FSDP, tensors"
                " spread over a mesh, SyncBatchNorm), and one of them cannot split its batch alone;"
                " decorate the whole training instead, @autofit.resilient(batch_size=...)"
            )

    # --- after a failure -----------------------------------------------------------------------

    def _short(self, error: Exception) -> bool:
        self.found: Diagnosis = out_of_memory.diagnose(error, self.witness)
        return self.found.kind is Kind.OOM

    def _recover(self, error: Exception, cut: Cut, last: bool) -> list[torch.Tensor] | None:
        """Free what the failed part holds and make the limit smaller.

        ``last``: the part in which the ranks reduce the gradients, where there are several.
        Returns the parameters that have not received the failed part's gradient; ``None`` where
        none has. Raises where nothing smaller is left, or the part cannot be taken back.
        """
        received = self._failed is not None
        unknown = self._failed is not None and self.step.parameters.unknown(self._failed)
        self._failed = None
        out_of_memory.give_back(error)
        self.attempt += 1
        part = cut[1] - cut[0]
        if part <= self.step.smallest or not self.limit.failed(part):
            error.add_note(f"autofit: {self.step.name} ran out of memory with {part} samples")
            raise error
        self.limit.samples = max(self.limit.samples, self.step.smallest)
        self._again = self.start is None or self.start.empty
        self._check_ranks(error, last)
        if unknown:
            raise CannotRetry(self._why("parameters that it had not used before")) from error
        if self._again:
            self._begin_again()
        elif received and self.step.backward is not None:
            raise CannotRetry(self._why("a backward= of its own")) from error
        self._tell(part)
        return self.before.missing() if received and not self._again else None

    def _check_ranks(self, error: Exception, last: bool) -> None:
        """Raise where the model cannot be split, or the ranks have begun to reduce gradients."""
        try:
            modules = self._modules()
        except CannotRetry as refusal:
            raise refusal from error
        if last and ranks.in_use() and _reducing(modules):
            if self.step.memory is not None:
                self.step.memory.remember(self.key, self._fitting, news=True, alone=True)
            raise CannotRetry(
                f"{self.step.name} ran out of memory in a part whose gradients"
                " DistributedDataParallel reduces: what it has told the other ranks cannot be taken"
                f" back; started again, it takes {self.limit.samples} samples at a time"
            ) from error

    def _begin_again(self) -> None:
        if self.start is not None:
            self.start.clear()
        self.start = None
        self.outputs, self.done, self.weights = [], [], []
        self.random.restore()

    def _why(self, what: str) -> str:
        return (
            f"{self.step.name} ran out of memory in backward with {what}: which gradients have"
            " arrived cannot be told; call it with empty gradients, or with smaller batches"
        )

    def _tell(self, part: int) -> None:
        record = Retry(
            function=self.step.name,
            attempt=self.attempt,
            tried=f"{part} samples at a time",
            next=f"{self.limit.samples} samples at a time",
            message=self.found.message,
            requested=self.found.requested,
            memory=out_of_memory.held(),
        )
        log.warning(
            "%s: out of memory with %s; goes on with %s", record.function, record.tried, record.next
        )
        for hook in (*switches.hooks(), *self.step.hooks):
            hook(record)

    def _held(self) -> None:
        self.limit.held(self.samples, self.step.grows)
        if self.limit.samples != self._bound and self.step.memory is not None:
            self.step.memory.remember(self.key, self._fitting, news=True)

    @property
    def _fitting(self) -> dict[str, int]:
        return {"samples": self.limit.samples}


def _reducing(modules: list[nn.Module]) -> list[nn.parallel.DistributedDataParallel]:
    """Return what reduces the gradients of this step over the ranks."""
    kinds = nn.parallel.DistributedDataParallel
    return [m for m in modules if isinstance(m, kinds) and m.require_backward_grad_sync]


def _shapes(batch: Batch) -> Key:
    """Return what is alike in batches of another number of samples."""
    return tuple(
        (*leaf.shape[: batch.dim], *leaf.shape[batch.dim + 1 :], leaf.dtype)
        if isinstance(leaf, torch.Tensor)
        else type(leaf).__name__
        for leaf in batch.leaves
    )


def _backward(
    own: Callable[[torch.Tensor], object] | None,
    loss: torch.Tensor,
    weight: float,
    only: list[torch.Tensor] | None,
) -> None:
    """Bring ``weight`` times the loss's gradient into ``.grad``, of ``only`` some if given."""
    if own is not None:
        own(loss * weight if weight != 1.0 else loss)
    elif only != []:
        gradient = None if weight == 1.0 else torch.full_like(loss, weight)
        torch.autograd.backward(loss, gradient, inputs=only)


# --- wrappers ---------------------------------------------------------------------------------


def run(step: Step, arguments: Arguments) -> Any:
    """Run the step and return what it returns for the whole batch."""
    outcome: Any = None
    with closing(step.work(arguments)) as work:
        while True:
            try:
                given, answers = work.send(outcome)
            except StopIteration as end:
                return end.value
            outcome = None
            outcome = _called(step.function, answers, *given)
            del given


async def run_async(step: Step, arguments: Arguments) -> Any:
    """Await the step and return what it returns for the whole batch."""
    outcome: Any = None
    with closing(step.work(arguments)) as work:
        while True:
            try:
                given, answers = work.send(outcome)
            except StopIteration as end:
                return end.value
            outcome = None
            outcome = await _attempt_async(step.function, answers, *given)
            del given


def _called(function: Callable[..., Any], answers: Answers, args: Any, kwargs: Any) -> Outcome:
    try:
        attempted = switches.Attempted()
        value = function(*args, **kwargs)
        attempted.done()
    except Exception as error:
        if not answers(error):
            raise
        return [None, error]
    return [value, None]


async def _attempt_async(
    function: Callable[..., Any], answers: Answers, args: Any, kwargs: Any
) -> Outcome:
    try:
        attempted = switches.Attempted()
        value = await function(*args, **kwargs)
        attempted.done()
    except Exception as error:
        if not answers(error):
            raise
        return [None, error]
    return [value, None]
