"""The plan that a decorated function receives. Applying it imports torch; this module does not."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from autofit.exceptions import UsageError
from autofit.plan import Plan
from autofit.strategies import AS_IS, REGISTRY, SPLIT, Facts, Number, Strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from autofit.resilience.plan_session import PlanSession

log = logging.getLogger("autofit.resilient")

ON_OPTIMIZERS = {each.name for each in REGISTRY if each.changes_optimizers}
"""Strategies that change an optimizer; ``ActivePlan.apply`` needs the optimizer for them."""
ON_MODELS = {each.name for each in REGISTRY if each.changes_models} - ON_OPTIMIZERS
"""Strategies that change only a model."""

Model = TypeVar("Model", bound="nn.Module")
Steps = TypeVar("Steps", bound="Optimizer | None")


class ActivePlan:
    """The plan of one attempt: apply it to a model, or follow it in your own loop.

    ``apply`` applies every level. A loop that splits its own batches reads ``micro_batch`` and
    ``accumulation`` instead, and enters ``autocast()`` around the forward pass.
    """

    def __init__(
        self,
        plan: Plan,
        effective_batch: int | None = None,
        short: frozenset[Plan] = frozenset(),
    ) -> None:
        self.plan = plan
        """The levels, frozen."""
        self.effective_batch = effective_batch
        """Samples in an optimizer step; ``None`` unless given to the decorator or measured."""
        self.short = short
        """PlanFallbacks that ran out of memory earlier in this call."""
        self.used: set[str] = set()
        """Names of the strategies that the function has used."""
        self._sessions: list[PlanSession] = []

    @property
    def micro_batch(self) -> int | None:
        """The largest number of samples in a chunk; ``None`` if the batch is not split."""
        self.used.add(SPLIT)
        return self.plan.chunk

    @property
    def accumulation(self) -> int:
        """The number of micro-batches in an optimizer step; 1 if the batch is not split.

        The number is rounded up if the size does not divide the batch. The last micro-batch is
        smaller then.
        """
        size = self.micro_batch
        if size is None or self.effective_batch is None:
            return 1
        return -(-self.effective_batch // size)

    def autocast(self, device: str | None = None) -> AbstractContextManager[object]:
        """Return a context manager with the precision of the plan: autocast, TF32, or nothing.

        ``device`` defaults to ``"cuda"`` if a GPU is available, else to ``"cpu"``. With float16,
        your loop must use a ``torch.amp.GradScaler``; ``apply`` scales the loss itself.
        """
        plain = Strategy.around_forward
        having = {s.name for s in REGISTRY if type(s).around_forward is not plain}
        self.used |= having
        if not any(name in having for name, _ in self.plan.changes):
            return nullcontext()
        from autofit.worker.meter import accelerator

        device = device or accelerator.device()
        found = (strategy.around_forward(level, device) for strategy, level in self.plan)
        return next((context for context in found if context is not None), nullcontext())

    def apply(self, model: Model, optimizer: Steps = None) -> tuple[Model, Steps]:  # type: ignore[assignment]
        """Apply the plan to ``model`` and ``optimizer`` until the decorated function ends.

        Returns the same two objects. The plan changes how the model is called and how the optimizer
        steps. The call of the model splits the batch, so your loop does not change.

        Before the first call with gradients, autofit compares each technique with the plain model
        on that batch. If the results differ by more than the technique may change, the function
        starts again without it.

        Levels that change optimizers are left out, with a warning, if no optimizer is given or if
        it has a learning-rate scheduler already.
        """
        from autofit.resilience.plan_session import PlanSession

        why = ""
        if optimizer is None:
            why = "plan.apply(model) was given no optimizer"
        elif "step" in vars(optimizer):
            why = "the optimizer has a scheduler already: apply the plan before you make it"
        self.used |= ON_MODELS if why else ON_MODELS | ON_OPTIMIZERS
        plan, left = self.plan, {name for name, _ in self.plan.changes} & ON_OPTIMIZERS
        if why and left:
            log.warning("%s: left out, since %s", Plan.of({name: plan[name] for name in left}), why)
            plan = plan.replace(**dict.fromkeys(left, AS_IS))
        if not self._sessions:
            self.plan = plan
        self._sessions.append(PlanSession(plan, model, None if why else optimizer))
        return model, optimizer

    @property
    def refused(self) -> tuple[str, str, str] | None:
        """Strategy, level and reason of a technique that was refused, if any."""
        return next((each.refusal for each in self._sessions if each.refusal), None)

    @property
    def facts(self) -> Facts:
        """Facts of the models that the plan was applied to; empty while none are known."""
        return next((each.facts for each in self._sessions if each.facts.roots), Facts())

    @property
    def reached(self) -> Plan:
        """The plan with the micro-batch size that fitted in the end."""
        sizes = [size for each in self._sessions if (size := each.micro_batch) is not None]
        return self.plan.with_number(Number.SAMPLES, str(min(sizes))) if sizes else self.plan

    def end(self) -> None:
        """Remove the plan from every model and optimizer."""
        for each in reversed(self._sessions):
            each.end()

    def __str__(self) -> str:
        return str(self.plan)


def staying(plan: Plan) -> Plan:
    """Return the levels of ``plan`` that cannot be undone when the function ends."""
    levels = ((strategy, strategy.level(name)) for strategy, name in plan)
    return Plan.of({s.name: each.name for s, each in levels if not each.undo})


def check_given(plan: Plan | None) -> None:
    """Raise ``UsageError`` for a plan that cannot be applied in a running process."""
    if plan is not None:
        plan.refuse_open()
    if plan is not None and plan.environment:
        names = ", ".join(plan.environment)
        raise UsageError(
            f"the plan needs {names} set before the process starts: use `autofit run` for it"
        )
    if plan is not None and not staying(plan).neutral:
        raise UsageError(f"{staying(plan)} stays until the process ends: use `autofit run` for it")
