"""The plan as a decorated function holds it. Imports torch when it is put to use, not before."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from autofit.exceptions import UsageError
from autofit.plan import Plan
from autofit.strategies import AS_IS, REGISTRY, Facts
from autofit.strategies.micro_batch import AUTO

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from autofit.resilience.plan_session import Applied

log = logging.getLogger("autofit.resilient")

ON_OPTIMIZERS = {each.name for each in REGISTRY if each.changes_optimizers}
"""Strategies that change an optimizer: what ``ActivePlan.apply`` needs it for."""
ON_MODELS = {each.name for each in REGISTRY if each.changes_models} - ON_OPTIMIZERS
"""Strategies that change a model alone."""

Model = TypeVar("Model", bound="nn.Module")
Steps = TypeVar("Steps", bound="Optimizer | None")


class ActivePlan:
    """The plan of one attempt: apply it to a model, or follow it in the code of the loop.

    ``apply`` does all of it. A loop that cuts its own batches reads ``micro_batch`` and
    ``accumulation``, and enters ``autocast()`` around its forward.
    """

    def __init__(
        self,
        plan: Plan,
        effective_batch: int | None = None,
        short: frozenset[Plan] = frozenset(),
    ) -> None:
        self.plan = plan
        """The levels themselves, frozen."""
        self.effective_batch = effective_batch
        """Samples in an optimizer step, where the decorator was told or the search has seen it."""
        self.short = short
        """Plans that ran out of memory earlier in this call."""
        self.used: set[str] = set()
        """Strategies that the function has followed."""
        self._applied: list[Applied] = []

    @property
    def micro_batch(self) -> int | None:
        """The largest number of samples in a chunk; ``None`` for the whole batch."""
        self.used.add("micro_batch")
        level = self.plan["micro_batch"]
        return None if level == AS_IS else int(level)

    @property
    def accumulation(self) -> int:
        """The number of micro-batches in an optimizer step; 1 if the batch is not split.

        Rounded up where they do not divide the batch: then the last one is smaller.
        """
        size = self.micro_batch
        if size is None or self.effective_batch is None:
            return 1
        return -(-self.effective_batch // size)

    def autocast(self, device: str | None = None) -> AbstractContextManager[object]:
        """Return a context manager with the precision of the plan: autocast, TF32, or nothing.

        ``device``: ``"cuda"`` where there is a GPU, else ``"cpu"``. float16 needs a
        ``torch.amp.GradScaler`` as everywhere; ``apply`` scales by itself.
        """
        self.used.add("precision")
        if self.plan["precision"] == AS_IS:
            return nullcontext()
        from autofit.resilience.plan_session import precision

        return precision(self.plan["precision"], device)

    def apply(self, model: Model, optimizer: Steps = None) -> tuple[Model, Steps]:  # type: ignore[assignment]
        """Apply the plan to ``model`` and ``optimizer`` until the decorated function ends.

        Returns both, the same objects: what the plan changes is how the model is called, and how
        the optimizer steps. The batch is split inside that call, so the loop around it stays as it
        is. Before the first call with gradients each technique is compared with the plain model on
        that very batch; one that does not keep its promise is left out, and the function starts
        again without it. What changes optimizers is left out, with a warning, where none is given,
        or one that a scheduler has taken hold of before.
        """
        from autofit.resilience.plan_session import Applied

        why = ""
        if optimizer is None:
            why = "plan.apply(model) was given no optimizer"
        elif "step" in vars(optimizer):
            why = "the optimizer has a scheduler already: apply the plan before that is made"
        self.used |= ON_MODELS if why else ON_MODELS | ON_OPTIMIZERS
        plan, left = self.plan, {name for name, _ in self.plan.changes} & ON_OPTIMIZERS
        if why and left:
            log.warning("%s: left out, since %s", Plan.of({name: plan[name] for name in left}), why)
            plan = plan.replace(**dict.fromkeys(left, AS_IS))
        if not self._applied:
            self.plan = plan
        self._applied.append(Applied(plan, model, None if why else optimizer))
        return model, optimizer

    @property
    def refused(self) -> tuple[str, str, str] | None:
        """Strategy, level and reason of a technique that was refused, if any."""
        return next((each.refusal for each in self._applied if each.refusal), None)

    @property
    def facts(self) -> Facts:
        """What is known of the models that the plan was applied to."""
        return next((each.facts for each in self._applied if each.facts.roots), Facts())

    @property
    def reached(self) -> Plan:
        """The plan at the end, with the micro-batch size that memory finally allowed."""
        sizes = [size for each in self._applied if (size := each.micro_batch) is not None]
        return self.plan.replace(micro_batch=str(min(sizes))) if sizes else self.plan

    def end(self) -> None:
        """Remove the plan from every model and optimizer."""
        for each in reversed(self._applied):
            each.end()

    def __str__(self) -> str:
        return str(self.plan)


def staying(plan: Plan) -> Plan:
    """Return the levels of ``plan`` that cannot be taken back when the function ends."""
    levels = ((strategy, strategy.level(name)) for strategy, name in plan)
    return Plan.of({s.name: each.name for s, each in levels if not (each.undo or each.late)})


def check_given(plan: Plan | None) -> None:
    """Raise ``UsageError`` for a plan that cannot be put into a running process."""
    if plan is not None and plan["micro_batch"] == AUTO:
        raise UsageError("micro_batch auto is for a search: give a number of samples")
    if plan is not None and plan.environment:
        names = ", ".join(plan.environment)
        raise UsageError(
            f"the plan needs {names} set before the process starts: use `autofit run` for it"
        )
    if plan is not None and not staying(plan).neutral:
        raise UsageError(f"{staying(plan)} stays until the process ends: use `autofit run` for it")
