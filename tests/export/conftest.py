from __future__ import annotations

from collections.abc import Callable

import pytest

from autofit.analysis.result import Result
from autofit.plan import Plan
from autofit.strategies import Hardware
from autofit.worker.records.trials import Measurement, Script, Verdict

MakeResult = Callable[..., Result]


@pytest.fixture
def make_result() -> MakeResult:
    """Return what makes a result with this plan; other fields are fixed but for those given."""

    def make(plan: Plan, **changed: object) -> Result:
        measurement = Measurement(
            micro_batch=8,
            effective_batch=16,
            step_seconds=(0.5, 0.75, 1.0),
            peak_allocated=1 << 30,
            peak_reserved=3 << 29,
            peak_device=2 << 30,
        )
        fields: dict[str, object] = {
            "study": "3f9c0000",
            "script": Script(
                target="train.py", cwd="/project", args=("--name", 'a "b"\\c\td é\x7f')
            ),
            "hardware": Hardware(device="cuda", name="NVIDIA H200", total_bytes=1 << 37),
            "budget": 3 << 30,
            "plan": plan,
            "measurement": measurement,
            "confirmed": True,
            "fidelity": str(plan.fidelity()),
            "baseline": None,
            "baseline_verdict": Verdict.OUT_OF_MEMORY,
            "variation": 0.0,
            "trials": 4,
            "launches": 3,
            "launches_out_of_memory": 1,
            "search_seconds": 112.5,
            "seconds_by_phase": (("import", 12.5), ("first batch", 0.5)),
            "versions": {"torch": "2.13.0+cpu", "a package": "1"},
        }
        return Result(**(fields | changed))  # type: ignore[arg-type]

    return make
