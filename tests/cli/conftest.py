from __future__ import annotations

from collections.abc import Callable

import pytest

from autofit.analysis.result import Result
from autofit.plan import Plan
from autofit.strategies import Facts, Hardware, RootFacts
from autofit.tuning.notices import StudyStarted
from autofit.worker.records.trials import Measurement, Script, TrialReport, Verdict

GIB = 1 << 30
H200 = Hardware(device="cuda", name="NVIDIA H200", total_bytes=int(139.8 * GIB))
SCRIPT = Script(target="train.py", args=("--epochs", "3"), cwd="/project")


@pytest.fixture
def opened() -> StudyStarted:
    """Return the first notice of a search within 24 GiB."""
    return StudyStarted(
        study="3f9c0000",
        script=SCRIPT,
        hardware=H200,
        devices=1,
        budget=24 * GIB,
        asked=True,
        allow="rounding",
        resumed=0,
    )


@pytest.fixture
def facts() -> Facts:
    """Return the facts of a Hugging Face model, accumulating twice."""
    root = RootFacts(
        name="LlamaForCausalLM",
        parameters=1_100_000_000,
        parameter_bytes=4_400_000_000,
        trainable=1_100_000_000,
        dtype="float32",
        batch=8,
        blocks=22,
        transformers=True,
    )
    return Facts(roots=(root,), optimizers=("AdamW",), calls_per_step=2)


@pytest.fixture
def measure() -> Callable[..., Measurement]:
    """Return what makes a measurement of so many samples/s with a peak of so many GiB.

    ``spread``: how far the speed may be off, as a share.
    """

    def make(rate: float, peak: float, spread: float = 0.0) -> Measurement:
        size = int(peak * GIB)
        return Measurement(
            micro_batch=8,
            effective_batch=16,
            step_seconds=tuple(16 / rate * (1 + part * spread) for part in (-1, 0, 0, 0, 1)),
            peak_allocated=size,
            peak_reserved=size,
            peak_device=size,
        )

    return make


@pytest.fixture
def measured(
    measure: Callable[..., Measurement],
) -> Callable[..., TrialReport]:
    """Return what makes the report of a measured plan; ``spread`` as for ``measure``."""

    def make(plan: Plan, rate: float, peak: float, spread: float = 0.0) -> TrialReport:
        measurements = (measure(rate, peak, spread),)
        return TrialReport(
            index=0, plan=plan, best=plan, verdict=Verdict.MEASURED, measurements=measurements
        )

    return make


@pytest.fixture
def make_result(measure: Callable[..., Measurement]) -> Callable[..., Result]:
    """Return what makes a result; other fields are fixed but for those given."""

    def make(**changed: object) -> Result:
        fields: dict[str, object] = {
            "study": "3f9c0000",
            "script": SCRIPT,
            "hardware": H200,
            "budget": 24 * GIB,
            "plan": Plan.of({"precision": "bf16", "micro_batch": "8"}),
            "measurement": measure(20.3, 23.1),
            "confirmed": True,
            "fidelity": "rounding",
            "baseline": None,
            "baseline_verdict": Verdict.OUT_OF_MEMORY,
            "variation": 0.0,
            "trials": 6,
            "launches": 6,
            "launches_out_of_memory": 1,
            "search_seconds": 112.0,
            "versions": {},
        }
        return Result(**(fields | changed))  # type: ignore[arg-type]

    return make
