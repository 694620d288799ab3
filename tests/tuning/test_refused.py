"""What a refusal teaches a search: the technique is left out, and what contains it is not tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.storage import Store
from autofit.strategies import AS_IS, NAMES, Facts, Fidelity, RootFacts
from autofit.tuning.history import History
from autofit.tuning.proposals import Proposer
from autofit.worker.records.trials import Measurement, OutOfMemory, TrialReport, Verdict
from tests.tuning.simulated import GIB, H200, OOM, opened, searched

pytestmark = pytest.mark.quick

BUDGET = 24 * GIB
REASON = "the gradients differ from the plain model's"
ROOT = RootFacts(
    name="Net",
    parameters=GIB // 4,
    parameter_bytes=GIB,
    trainable=GIB // 4,
    dtype="float32",
    batch=16,
    blocks=24,
    transformers=True,
    attention="sdpa",
)
FACTS = Facts(roots=(ROOT,), optimizers=("AdamW",), stepped=True)


@dataclass(frozen=True)
class Refusing:
    """A model of 1 GiB that does not keep still under some levels together."""

    levels: frozenset[tuple[str, str]]
    blamed: str | None = None

    def launched(self, plan: Plan, facts: Facts, index: int) -> tuple[TrialReport, Facts]:
        """Return what a trial says, and what is known of the script after it."""
        if self.levels <= {*plan.changes}:
            verdict = Verdict.REFUSED
            return TrialReport(
                index=index, plan=plan, verdict=verdict, reason=REASON, blamed=self.blamed
            ), FACTS
        half = plan["precision"] != AS_IS or plan["weights"] != AS_IS
        sample = (1.0 if half else 2.0) * GIB / (1 if plan["checkpointing"] == AS_IS else 3)
        seconds = (0.5 if half else 1.0) * (1.0 if plan["checkpointing"] == AS_IS else 1.3)
        sizes = [16] if plan["micro_batch"] == AS_IS else [1, 2, 4, 8, 16]
        sizes = [size for size in sizes if 5 * GIB + size * sample <= BUDGET]
        if not sizes:
            error = OutOfMemory(phase="forward", message="no memory", requested=GIB, micro_batch=1)
            return TrialReport(index=index, plan=plan, verdict=OOM, out_of_memory=error), FACTS
        measured = tuple(
            Measurement(
                micro_batch=size,
                effective_batch=16,
                step_seconds=(seconds * (1 + 0.1 * 16 / size),) * 3,
                peak_allocated=int(5 * GIB + size * sample),
                peak_reserved=int(5 * GIB + size * sample),
                peak_device=int(5 * GIB + size * sample),
            )
            for size in sizes
        )
        best = plan.replace(micro_batch=str(sizes[-1]))
        return TrialReport(
            index=index, plan=plan, verdict=Verdict.MEASURED, best=best, measurements=measured
        ), FACTS


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    """A new study of such a script."""
    with Store(str(tmp_path / "autofit.db")) as store:
        others = {*NAMES} - {"precision", "checkpointing", "optimizer", "micro_batch"}
        yield opened(store, tmp_path, Fidelity.ROUNDING, BUDGET, *others)


def refusals(history: History) -> list[Plan]:
    """The plans that were refused, in their order."""
    return [t.plan for t in history.now.finished if t.verdict is Verdict.REFUSED]


def test_a_refused_technique_is_left_out_at_once_with_its_reason(history: History) -> None:
    searched(history, Refusing(frozenset({("precision", "bf16")}), "precision"))
    assert len(refusals(history)) == 1
    assert history.study.left_out == (("precision", "bf16", REASON),)
    fallback = Proposer(history, H200).fallback()
    assert fallback is None or fallback["precision"] != "bf16"


def test_what_is_refused_only_together_is_not_tried_with_more_beside_it(history: History) -> None:
    """Neither is left out by itself. A plan with less beside it may be tried."""
    searched(history, Refusing(frozenset({("precision", "bf16"), ("micro_batch", "auto")})))
    levels = [set(plan.changes) for plan in refusals(history)]
    assert levels
    for before, after in combinations(levels, 2):
        assert not before <= after
    assert history.study.left_out == ()
    assert Verdict.MEASURED in {trial.verdict for trial in history.now.finished}
