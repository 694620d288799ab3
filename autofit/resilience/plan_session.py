"""Applies a plan to a model and an optimizer in the user's own process. Imports torch.

The techniques see the same root as under ``autofit run``. The harness's process-wide observers are
not installed, because the caller names the model and the optimizer.
"""

from __future__ import annotations

import logging

from torch import nn
from torch.optim import Optimizer

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import AS_IS
from autofit.worker import meter
from autofit.worker.harness.patching.optimizers import changes_of
from autofit.worker.harness.session.session import Session
from autofit.worker.meter import accelerator
from autofit.worker.records.trials import OutOfMemory

log = logging.getLogger("autofit.resilient")


class PlanSession(Session):
    """Applies one plan to one model and its optimizer, until ``end``."""

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer | None) -> None:
        super().__init__(meter.for_device(accelerator.device()))
        self.refusal: tuple[str, str, str] | None = None
        """Strategy, level and reason of the technique that was refused, if any."""
        self._plan = plan
        self._reached: int | None = None
        self.new_root(model)
        if optimizer is not None and changes_of(plan):
            self.optimizers.attach_to(optimizer)

    @property
    def micro_batch(self) -> int | None:
        """The largest chunk now, or at the end; ``None`` if the batch is not split."""
        return self.roots[0].splits.micro_batch or self._reached

    def end(self) -> None:
        """Remove the plan from the model and the optimizer."""
        self._reached = self.micro_batch
        self.stop()

    def optimizer_plan(self) -> Plan:
        """Return the one plan."""
        return self._plan

    def optimizer_refused(self, refusal: Refused) -> None:
        """Note which technique it was; the attempt ends here."""
        name = refusal.strategy or next((name for name, _ in self._plan.changes), "")
        self.refusal = (name, self._plan[name] if name else AS_IS, str(refusal))
        raise refusal

    def shortage(self, found: OutOfMemory) -> None:
        """Log a warning if the step continues in smaller chunks."""
        if (found.micro_batch or 0) > 1:
            log.warning(
                "out of memory in %s with %s samples at a time; continues with fewer",
                found.phase,
                found.micro_batch,
            )
