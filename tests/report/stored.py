"""What the stored studies of these tests are made of."""

from __future__ import annotations

from pathlib import Path

from autofit.facts import Facts, Hardware, RootFacts
from autofit.plan import Plan
from autofit.storage import Owner, Purpose, Store, StudyKey, StudyRecord
from autofit.worker.records.traces import Trace, TracedStep
from autofit.worker.records.trials import Measurement, Script, TrialReport, Verdict

GIB = 1 << 30
H200 = Hardware(device="cuda", name="NVIDIA H200", total_bytes=140 * GIB)
BF16 = Plan.of({"precision": "bf16"})
FUSED = Plan.of({"precision": "bf16", "optimizer": "fused"})
LEAN = Plan.of({"precision": "bf16", "checkpointing": "all"})
EVIL = "<img src=x onerror=alert(1)>"
"""The name of a file, and a reason, that would do harm in a page that does not escape them."""
FACTS = Facts(
    roots=(
        RootFacts(
            name="GPT",
            parameters=GIB,
            parameter_bytes=4 * GIB,
            trainable=GIB,
            dtype="float32",
            batch=16,
            blocks=22,
        ),
    ),
    optimizers=("AdamW",),
    stepped=True,
)


def figures(rate: float, peak: float, losses: tuple[float, ...] = ()) -> Measurement:
    """Return figures of so many samples/s, with a peak of so many GiB."""
    return Measurement(
        micro_batch=16,
        effective_batch=16,
        step_seconds=tuple(16 / rate * factor for factor in (0.97, 1.0, 1.0, 1.01, 1.05)),
        peak_allocated=int((peak - 1) * GIB),
        peak_reserved=int((peak - 0.5) * GIB),
        peak_device=int(peak * GIB),
        losses=losses,
    )


def measured(plan: Plan, *found: Measurement) -> TrialReport:
    return TrialReport(index=0, plan=plan, best=plan, verdict=Verdict.MEASURED, measurements=found)


def trace(*losses: float) -> Trace:
    """Return a trace of steps with these losses."""
    return Trace(
        names=("w",),
        sizes=(1,),
        rounding=(0.0,),
        epsilon=1e-7,
        buckets=1,
        start="",
        steps=tuple(TracedStep(losses=(loss,)) for loss in losses),
    )


def opened(store: Store) -> StudyRecord:
    """Return a new study of a script with an evil name."""
    Path(f"{EVIL}.py").write_text("pass\n")
    script = Script(target=f"{EVIL}.py", args=("--lr", "</script>"), cwd=str(Path.cwd()))
    key = StudyKey.of(script, gpu=H200.name, gpus=1, memory=24 * GIB, allow="rounding")
    return store.open_study(
        key, script=script, hardware=H200, budget=24 * GIB, versions={"torch": "2.13"}
    )


def add(
    store: Store,
    study: StudyRecord,
    report: TrialReport,
    purpose: Purpose = Purpose.SEARCH,
    first: Trace | None = None,
) -> None:
    """Add a finished trial."""
    launch, owner = store.next_launch(study), Owner.current()
    (trial,) = store.add_trials(study, [report.plan], launch=launch, owner=owner, purpose=purpose)
    store.finish(trial, report, trace=first)
