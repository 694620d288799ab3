"""The decorators as a type checker sees them: mypy reads this file, nothing runs it."""

from typing import assert_type

import autofit
from autofit.resilience import ActivePlan


@autofit.resilient(batch_size=256)
def sized(batch_size: int, name: str, *, epochs: int = 1) -> float:
    """Train."""
    return batch_size * 1.0


@autofit.resilient(batch_size=256)
def accumulating(batch_size: int, accumulation: int, name: str) -> float:
    """Train."""
    return batch_size * 1.0


@autofit.resilient
def planned(plan: ActivePlan, name: str) -> float:
    """Train."""
    return float(plan.accumulation)


@autofit.resilient(plan={"precision": "bf16"}, effective_batch=32)
def given(plan: ActivePlan, name: str) -> float:
    """Train."""
    return float(plan.accumulation)


@autofit.resilient.step
def step(batch: list[int], scale: float = 1.0) -> float:
    """Train."""
    return scale


assert_type(step([1], scale=2.0), float)
step("x")  # type: ignore[arg-type]


class Trainer:
    """Has a method of each form."""

    @autofit.resilient
    def planned(self, plan: ActivePlan, name: str) -> float:
        """Train."""
        return float(plan.accumulation)

    @autofit.resilient(batch_size=256)
    def sized(self, batch_size: int, name: str) -> float:
        """Train."""
        return batch_size * 1.0


assert_type(sized("x", epochs=2), float)
assert_type(accumulating("x"), float)
assert_type(planned("x"), float)
assert_type(given("x"), float)
assert_type(Trainer().sized("x"), float)
assert_type(Trainer().planned("x"), float)
sized(32, "x")  # type: ignore[call-arg, arg-type]
sized(3)  # type: ignore[arg-type]
Trainer().sized(32, "x")  # type: ignore[call-arg, arg-type]


@autofit.resilient(batch_size=256)  # type: ignore[arg-type]
def takes_no_size(name: str) -> None:
    """Train."""
