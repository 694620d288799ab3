"""A store in a file or on a server, and records to put into it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.storage import Store, StudyKey, StudyRecord
from autofit.strategies import Facts, Hardware, RootFacts
from autofit.worker.records.trials import Measurement, OutOfMemory, Script, TrialReport, Verdict

Open = Callable[..., StudyRecord]
Report = Callable[..., TrialReport]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    (tmp_path / "train.py").write_text("pass\n")
    return Script(target="train.py", args=("--epochs", "3"), cwd=str(tmp_path))


@pytest.fixture
def hardware() -> Hardware:
    return Hardware(device="cuda", name="NVIDIA H200", total_bytes=150 << 30, capability=(9, 0))


@pytest.fixture
def key(script: Script) -> StudyKey:
    return StudyKey.of(script, gpu="NVIDIA H200", gpus=1, memory=24 << 30, allow="rounding")


@pytest.fixture
def facts() -> Facts:
    root = RootFacts(
        name="GPT",
        parameters=10,
        parameter_bytes=40,
        trainable=9,
        dtype="float32",
        batch=16,
        blocks=22,
    )
    return Facts(roots=(root, root), optimizers=("AdamW",), calls_per_step=4, scaler=True)


@pytest.fixture
def plan() -> Plan:
    return Plan.of({"precision": "bf16", "checkpointing": "all"})


@pytest.fixture
def report() -> Report:
    """Return a report on a plan, with every field filled."""

    def make(plan: Plan, verdict: Verdict = Verdict.MEASURED, size: int = 8) -> TrialReport:
        measurement = Measurement(
            micro_batch=size,
            effective_batch=64,
            step_seconds=(0.1 + 0.2, 1 / 3, 1e-300),
            peak_allocated=(1 << 40) + 1,
            peak_reserved=2,
            peak_device=3,
            allocation_retries=1,
            data_wait=0.25,
            losses=(2.5, 1e30, 0.1),
        )
        return TrialReport(
            index=1,
            plan=plan,
            verdict=verdict,
            reason="backward, 2.0 GiB requested",
            best=plan.replace(micro_batch="8"),
            measurements=(measurement, measurement),
            out_of_memory=OutOfMemory(
                phase="backward", message="out of memory", requested=1 << 31, micro_batch=16
            ),
            blamed="precision",
            traceback="Traceback (most recent call last):\n  é\n",
            startup_seconds=5.5,
            seconds_by_phase=(("import", 5.5), ("first batch", 0.1 + 0.2)),
        )

    return make


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "autofit.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def location(request: pytest.FixtureRequest, path: Path) -> str:
    """Return the URL of a store that is not there yet: every test that takes it runs on both."""
    if request.param == "sqlite":
        return f"sqlite:///{path}"
    make: Callable[[], str] = request.getfixturevalue("postgresql")
    return make()


@pytest.fixture
def store(location: str) -> Iterator[Store]:
    with Store(location) as store:
        yield store


@pytest.fixture
def opening(key: StudyKey, script: Script, hardware: Hardware) -> Open:
    """Open the study of ``key`` in a store."""

    def make(store: Store, *, fresh: bool = False, key: StudyKey = key) -> StudyRecord:
        return store.open_study(
            key,
            script=script,
            hardware=hardware,
            budget=24 << 30,
            versions={"torch": "2.13.0"},
            fresh=fresh,
        )

    return make


@pytest.fixture
def study(store: Store, opening: Open) -> StudyRecord:
    return opening(store)
