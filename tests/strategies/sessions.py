"""A real session in the tests' own process: what is trained within it is trained under a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.worker import meter
from autofit.worker.harness.session.root import HarnessRoot, RunPolicy
from autofit.worker.harness.session.session import Session


class Under(Session):
    """Trains under one plan; whatever a strategy refuses ends it."""

    def __init__(self, plan: Plan, *, strict: bool) -> None:
        super().__init__(meter.for_device("cpu"))
        self.plan = plan
        self._strict = strict

    def policy(self, module: nn.Module) -> RunPolicy:
        return RunPolicy(strict=self._strict)

    def plan_for(self, root: HarnessRoot) -> Plan:
        return self.plan

    def plans(self) -> tuple[Plan, ...]:
        return (self.plan,)

    def optimizer_plan(self) -> Plan:
        return self.plan

    def optimizer_refused(self, refusal: Refused) -> None:
        raise refusal

    def optimizer_broke(self, error: Exception) -> bool:
        return False

    def refused(self, root: HarnessRoot, refusal: Refused) -> None:
        raise refusal


@contextmanager
def under(plan: Plan, *, strict: bool = False) -> Iterator[Under]:
    """Let what is trained within it be trained under ``plan``; ``strict``: it is measured."""
    session = Under(plan, strict=strict)
    session.seams.knows_optimizers = False  # tests need not make one
    session.start()
    try:
        yield session
    finally:
        session.stop()
