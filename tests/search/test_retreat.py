"""Where a run goes that has died for want of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autofit.plan import Plan
from autofit.retreat import Ground, next_rung
from autofit.storage import TrialRecord
from autofit.strategies import Facts, Fidelity, Hardware, RootFacts
from autofit.worker.records import Measurement, TrialReport, Verdict

pytestmark = pytest.mark.quick

CPU = Hardware(device="cpu", name="a CPU", total_bytes=1 << 34)
ROOT = RootFacts(
    name="Net", parameters=1, parameter_bytes=4, trainable=1, dtype="float32", batch=8, blocks=4
)
FACTS = Facts(roots=(ROOT,), optimizers=("SGD",))
GROUND = Ground(hardware=CPU, allow=Fidelity.ROUNDING, facts=FACTS, budget=1000)


@pytest.fixture
def measured(
    measurement: Callable[..., Measurement], finished: Callable[[TrialReport], TrialRecord]
) -> Callable[..., TrialRecord]:
    """A trial of a plan that was measured: its peak, and the seconds of its step."""

    def make(levels: dict[str, str], peak: int, seconds: float) -> TrialRecord:
        plan = Plan.of(levels)
        figures = replace(
            measurement(8), peak_device=peak, step_seconds=(seconds, seconds, seconds)
        )
        report = TrialReport(
            index=0, plan=plan, verdict=Verdict.MEASURED, best=plan, measurements=(figures,)
        )
        return finished(report)

    return make


def test_the_fastest_measured_plan_that_needed_less(measured: Callable[..., TrialRecord]) -> None:
    trials = (
        measured({"micro_batch": "4"}, 800, 1.0),
        measured({"micro_batch": "2"}, 780, 1.1),  # hardly less: it would die of the same
        measured({"checkpointing": "all"}, 300, 1.3),
        measured({"checkpointing": "half"}, 500, 1.2),
        measured({"precision": "bf16"}, 900, 0.5),
    )
    ground = replace(GROUND, trials=trials)
    first = next_rung(Plan.of({"micro_batch": "4"}), ground)
    assert first == Plan.of({"checkpointing": "half"})
    second = next_rung(first, ground, tried=[Plan.of({"micro_batch": "4"})])
    assert second == Plan.of({"checkpointing": "all"})


def test_what_was_not_measured_is_derived() -> None:
    plan, seen = Plan.of({"precision": "bf16"}), list[Plan]()
    while (rung := next_rung(plan, GROUND, seen)) is not None:
        seen.append(plan)
        plan = rung
    rungs = [dict(each.changes) for each in (*seen[1:], plan)]
    assert [each.get("micro_batch") for each in rungs] == ["4", "2", "1", "1", "1"]
    assert [each.get("checkpointing") for each in rungs] == [None, None, None, "half", "all"]
    assert all(each["precision"] == "bf16" for each in rungs)


def test_what_the_script_does_not_allow_is_no_rung() -> None:
    normalised = replace(FACTS, roots=(replace(ROOT, batch_norm=True, blocks=0),))
    assert next_rung(Plan(), replace(GROUND, facts=normalised)) is None


def test_without_facts_checkpointing_is_what_is_left() -> None:
    rung = next_rung(Plan(), replace(GROUND, facts=Facts()))
    assert rung == Plan.of({"checkpointing": "half"})


def test_an_allowance_holds() -> None:
    dropping = replace(FACTS, roots=(replace(ROOT, dropout=True),))
    ground = replace(GROUND, facts=dropping, allow=Fidelity.EXACT)
    assert next_rung(Plan(), ground) == Plan.of({"checkpointing": "half"})


def test_a_rung_leaves_out_what_cannot_stand_beside_it() -> None:
    ground = replace(GROUND, facts=replace(FACTS, roots=(replace(ROOT, batch=1),)))
    assert next_rung(Plan.of({"compile": "full"}), ground) == Plan.of({"checkpointing": "half"})
    regional = Plan.of({"compile": "regional"})
    assert next_rung(regional, ground) == regional.replace(checkpointing="half")


def test_the_bytes_missing_decide_between_rungs() -> None:
    """Weights and gradients hold 8 GiB of 20 there, AdamW's state 8 more."""
    big = replace(ROOT, parameters=1 << 30, parameter_bytes=4 << 30, trainable=1 << 30, batch=2)
    facts = replace(FACTS, roots=(big,), optimizers=("AdamW",))
    ground = replace(GROUND, facts=facts, budget=20 << 30)
    bf16 = Plan.of({"precision": "bf16"})
    assert next_rung(bf16, ground) == bf16.replace(micro_batch="1")
    assert next_rung(bf16, ground, missing=5 << 30) == bf16.replace(optimizer="eight_bit")
    state = next_rung(bf16, ground, activations=False)
    assert state == bf16.replace(optimizer="eight_bit"), "fewer samples would not help"
    exact = next_rung(Plan(), ground, tried=[Plan.of({"micro_batch": "1"})])
    assert exact is not None
    assert exact.fidelity(facts) <= Fidelity.REDRAW, "rounding comes last"
