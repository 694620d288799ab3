"""A search within so little memory that what plans hold decides: it ends when nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.storage import Store
from autofit.strategies import AS_IS, Facts, Fidelity, RootFacts
from autofit.tuning.history import History
from autofit.worker.records.trials import Measurement, OutOfMemory, TrialReport, Verdict
from tests.tuning.simulated import GIB, MIB, OOM, opened, searched

pytestmark = pytest.mark.quick

LARGE = RootFacts(
    name="VisionTransformer",
    parameters=303_404_132,
    parameter_bytes=4 * 303_404_132,
    trainable=303_404_132,
    dtype="float32",
    called=True,
    batch=64,
    blocks=24,
    classes=1000,
)


@dataclass(frozen=True)
class VisionTransformer:
    """ViT-L/16 on an H200, with the figures of a search within 2.2 GiB as far as known.

    A process that has run other plans has a heap in pieces once weights have become smaller.
    """

    budget: int
    least: float = 0.0
    """GiB that tensors take under any plan."""

    def tensors(self, plan: Plan, size: int) -> float:
        """Return the GiB that tensors take."""
        half = plan["weights"] != AS_IS
        one = LARGE.parameter_bytes / GIB * (0.5 if half else 1.0)
        weights = one if half or plan["precision"] == AS_IS else one + 0.2
        state = 2 * one * {"eight_bit": 0.26, "lion": 0.5, "sgd": 0.5}.get(plan["optimizer"], 1.0)
        if plan["weights"] == "bf16_master":
            weights += 0.0 if plan["optimizer_offload"] == "streamed" else one
            state *= 2
        gradients = 0.15 if plan["gradient_release"] == "hosted" else one
        state = 0.1 if plan["optimizer_offload"] == "streamed" else state
        if plan["adapters"] != AS_IS:  # 4 bits are made of weights that are there as well
            weights = 1.3 if plan["adapters"] == "qlora" else weights
            gradients, state = gradients / 20, state / 20
        blocks = 0.2 if plan["checkpointing"] == AS_IS else 0.012  # as many as it takes
        return max(self.least, weights + gradients + state) + size * blocks

    def launched(self, plan: Plan, facts: Facts, index: int) -> tuple[TrialReport, Facts]:
        """Return what a trial says, and what is known of the script after it."""
        pieces = 0.75 if index and plan["weights"] != AS_IS else 0.07
        pieces = 0.02 if plan["allocator"] == "expandable" else pieces
        held = 0.75 + 0.04 * index + pieces
        sizes = [64] if plan["micro_batch"] == AS_IS else [1, 2, 4, 8, 16, 32, 64]
        sizes = [int(plan["micro_batch"])] if plan["micro_batch"].isdigit() else sizes
        peaks = {size: int((self.tensors(plan, size) + held) * GIB) for size in sizes}
        fitting = [size for size in sizes if peaks[size] <= self.budget]
        known = Facts(roots=(LARGE,), optimizers=("AdamW",), stepped=facts.stepped or bool(fitting))
        if not fitting:
            fragmentation = f"{pieces * 1024:.2f} MiB is reserved by PyTorch but unallocated"
            error = OutOfMemory(
                phase="forward", message=fragmentation, requested=50 * MIB, micro_batch=1
            )
            report = TrialReport(index=index, plan=plan, verdict=OOM, out_of_memory=error)
            return report, known
        measured = tuple(
            Measurement(
                micro_batch=size,
                effective_batch=64,
                step_seconds=(1.0 + 0.02 * 64 / size,) * 3,
                peak_allocated=int(self.tensors(plan, size) * GIB),
                peak_reserved=int((self.tensors(plan, size) + pieces) * GIB),
                peak_device=peaks[size],
            )
            for size in fitting
        )
        best = plan.replace(micro_batch=str(fitting[-1]))
        report = TrialReport(
            index=index, plan=plan, verdict=Verdict.MEASURED, best=best, measurements=measured
        )
        return report, known


@pytest.fixture
def history(tmp_path: Path) -> Iterator[Callable[[Fidelity, int], History]]:
    """A new study of such a script."""
    with Store(str(tmp_path / "autofit.db")) as store:
        yield lambda allow, budget: opened(store, tmp_path, allow, budget)


def verdicts(history: History) -> list[Verdict | None]:
    """Return how the trials ended."""
    return [trial.verdict for trial in history.now.finished]


@pytest.mark.parametrize("allow", [Fidelity.ROUNDING, Fidelity.RECIPE])
def test_what_ran_out_in_a_heap_in_pieces_is_tried_in_a_process_of_its_own(
    history: Callable[..., History], allow: Fidelity
) -> None:
    """It is not the plan that has been ruled out, but what others had left behind."""
    budget = 22 * GIB // 10
    found = history(allow, budget)
    launches = searched(found, VisionTransformer(budget), most=4)
    assert verdicts(found) == [OOM] * 3 + [Verdict.MEASURED]
    in_pieces, alone = (trial.plan for trial in found.now.finished[2:])
    assert alone == in_pieces.replace(allocator="expandable")
    assert alone["weights"] == "bf16_master"
    assert launches == 2


@pytest.mark.parametrize("allow", [Fidelity.ROUNDING, Fidelity.RECIPE])
def test_a_search_gives_up_after_what_needs_least_has_run_out_by_itself(
    history: Callable[..., History], allow: Fidelity
) -> None:
    budget = 22 * GIB // 10
    found = history(allow, budget)
    launches = searched(found, VisionTransformer(budget, least=1.5))
    assert {*verdicts(found)} == {OOM}
    alone = [trial for trial in found.now.finished if trial.plan["allocator"] == "expandable"]
    assert all(trial.report is not None and trial.report.index == 0 for trial in alone)
    weights = "bf16" if allow is Fidelity.RECIPE else "bf16_master"
    least = {"weights": weights, "optimizer_offload": "streamed", "gradient_release": "hosted"}
    least |= {"checkpointing": "auto", "adapters": AS_IS}
    assert any(least.items() <= trial.plan.levels.items() for trial in alone)
    assert launches <= (6 if allow is Fidelity.RECIPE else 3)


def test_where_no_segments_grow_what_needs_least_is_tried_once(tmp_path: Path) -> None:
    """By itself it would be the same plan again, of which a study keeps one verdict: on a CPU."""
    budget = 33 * GIB // 10
    with Store(str(tmp_path / "autofit.db")) as store:
        found = opened(store, tmp_path, Fidelity.ROUNDING, budget, "allocator")
        searched(found, VisionTransformer(budget, least=2.6), most=20)
        plans = [trial.plan for trial in found.now.finished]
        assert {*verdicts(found)} == {OOM}
        assert len(plans) == len({*plans}) < 20, "nothing is left"


def test_what_needs_least_is_tried_where_arithmetic_alone_asked_for_nothing(
    history: Callable[..., History],
) -> None:
    """8-bit state would fit but for what a process holds besides: no set of levels was needed."""
    budget = 33 * GIB // 10
    found = history(Fidelity.ROUNDING, budget)
    launches = searched(found, VisionTransformer(budget), most=8)
    assert verdicts(found)[0] is OOM
    assert found.now.ranked
    assert launches <= 3
