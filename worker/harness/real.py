"""A real run: the script trains under one plan, and goes on smaller when memory runs out."""

from __future__ import annotations

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import AS_IS
from autofit.worker.harness.reporter import Reporter
from autofit.worker.harness.roots import HarnessRoot
from autofit.worker.harness.session import Session
from autofit.worker.meter import Meter
from autofit.worker.records import Learned, OutOfMemory, Shortage


class RealRun(Session):
    """Keeps one plan on every root; a refusal ends the run before it trains otherwise."""

    def __init__(self, plan: Plan, reporter: Reporter, meter: Meter) -> None:
        super().__init__(meter)
        self.index = 0
        self.over = False
        self._plan = plan
        self._reporter = reporter

    def plan_for(self, root: HarnessRoot) -> Plan:
        """Return the plan of the run."""
        return self._plan

    def splits(self) -> bool:
        """Return whether the plan splits the batch."""
        return self._plan["micro_batch"] != AS_IS

    def refused(self, root: HarnessRoot, refusal: Refused) -> None:
        """End the run: without the plan it would be another training, or run out of memory."""
        raise refusal

    def shortage(self, found: OutOfMemory) -> None:
        """Tell the parent, which tells the user and the store."""
        self._reporter.send(Shortage(index=0, out_of_memory=found))

    def learned(self) -> None:
        """Tell the parent, which needs it to find a leaner plan."""
        self._reporter.send(Learned(facts=self.facts))

    def boundary(self) -> None:
        """After the first step the device holds all that libraries load: let the cap follow."""
        if self.steps == 1:
            self.meter.reset()

    def script_ended(self) -> None:
        """Nothing is left to say."""
