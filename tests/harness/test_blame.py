"""Which strategy an error is laid to."""

from __future__ import annotations

import pytest

from autofit.plan import Plan
from autofit.strategies import get
from autofit.worker.harness.session import blamed

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("strategy", "culprit"), [("precision", "precision"), ("weights", None)])
def test_a_strategy_that_is_not_in_the_plan_is_not_blamed(
    strategy: str, culprit: str | None
) -> None:
    """Another may have called a function of its: bf16 weights run their forward under autocast."""
    frame: dict[str, object] = {"__name__": type(get("precision")).__module__}
    exec("def fail(): raise RuntimeError", frame)
    plan = Plan.of({strategy: get(strategy).levels[-1].name})
    with pytest.raises(RuntimeError) as caught:
        frame["fail"]()  # type: ignore[operator]
    assert blamed(caught.value.__traceback__, plan) == culprit
