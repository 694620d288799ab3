"""The frontier of a study, and the plan for another budget: both from a real SQLite file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from autofit.analysis.frontier import frontier
from autofit.analysis.ranking import best
from autofit.analysis.result import Result
from autofit.exceptions import NothingFits
from autofit.plan import Plan
from autofit.storage import Owner, Purpose, Store, StudyKey, StudyRecord
from autofit.strategies import Facts, Hardware, RootFacts
from autofit.worker.records.trials import Measurement, OutOfMemory, Script, TrialReport, Verdict

pytestmark = pytest.mark.quick

MIB = 1 << 20
BUDGET = 1000 * MIB
ROOT = RootFacts(
    name="Net", parameters=1, parameter_bytes=4, trainable=1, dtype="float32", batch=16, blocks=4
)
BF16 = Plan.of({"precision": "bf16", "micro_batch": "auto"})
TF32 = Plan.of({"precision": "tf32", "micro_batch": "auto"})
TWO = Plan.of({"checkpointing": "2", "micro_batch": "auto"})
COMPILED = Plan.of({"compile": "full", "micro_batch": "auto"})
SHORT = OutOfMemory(phase="forward", message="no memory")


def figures(size: int, rate: float, peak: int) -> Measurement:
    """A size with so many samples/s and a peak of so many MiB."""
    return Measurement(
        micro_batch=size,
        effective_batch=16,
        step_seconds=(16 / rate,),
        peak_allocated=peak * MIB,
        peak_reserved=peak * MIB,
        peak_device=peak * MIB,
    )


@dataclass
class Searched:
    """A study of one script to which tests add finished trials."""

    store: Store
    script: Script
    study: StudyRecord

    def trial(
        self,
        plan: Plan,
        *sizes: tuple[int, float, int],
        verdict: Verdict = Verdict.MEASURED,
        purpose: Purpose = Purpose.SEARCH,
    ) -> None:
        """Add a trial that measured ``(size, samples/s, peak in MiB)``, its best size last."""
        launch = self.store.next_launch(self.study)
        (trial,) = self.store.add_trials(
            self.study, [plan], launch=launch, owner=Owner.current(), purpose=purpose
        )
        best = plan
        if sizes and plan["micro_batch"] == "auto":
            best = plan.replace(micro_batch=str(sizes[-1][0])).whole(Facts(roots=(ROOT,)))
        report = TrialReport(
            index=0,
            plan=plan,
            verdict=verdict,
            best=best if verdict is Verdict.MEASURED else None,
            measurements=tuple(figures(*each) for each in sizes),
            out_of_memory=SHORT if verdict is Verdict.OUT_OF_MEMORY else None,
        )
        self.store.finish(trial, report)

    def shape(self) -> list[tuple[str, int, int]]:
        """The frontier as ``(plan, samples/s, peak in MiB)``."""
        return [
            (str(p.plan), round(p.measurement.samples_per_second), p.measurement.peak_device // MIB)
            for p in frontier(self.store, self.study)
        ]

    def best(self, memory: int) -> tuple[Result, list[str]]:
        """The plan for so many MiB, and the lines that were said."""
        said: list[str] = []
        result, _ = best(self.store.url, self.script, memory=memory * MIB, say=said.append)
        return result, said


@pytest.fixture
def studied(tmp_path: Path) -> Iterator[Callable[..., Searched]]:
    """Open the study of ``train.py`` that was searched with so many MiB."""
    (tmp_path / "train.py").write_text("")
    script = Script(target="train.py", cwd=str(tmp_path))
    hardware = Hardware(device="cpu", name="a CPU", total_bytes=1 << 34)
    with Store(str(tmp_path / "autofit.db")) as store:

        def make(memory: int = 1000) -> Searched:
            study = store.open_study(
                StudyKey.of(script, gpu="a CPU", gpus=1, memory=memory * MIB, allow="rounding"),
                script=script,
                hardware=hardware,
                budget=memory * MIB,
                versions={},
            )
            return Searched(store, script, store.set_facts(study, Facts(roots=(ROOT,))))

        yield make


@pytest.fixture
def searched(studied: Callable[..., Searched]) -> Searched:
    """A study whose winner was confirmed: bf16 with the whole batch."""
    searched = studied()
    searched.trial(Plan(), (16, 10, 900))
    searched.trial(BF16, (4, 12, 300), (8, 16, 500), (16, 20, 800))
    searched.trial(TWO, (4, 6, 200), (16, 9, 600))
    searched.trial(Plan.of({"precision": "bf16"}), (16, 19, 790), purpose=Purpose.CONFIRM)
    return searched


def test_each_size_is_a_point_and_dominated_points_are_left_out(searched: Searched) -> None:
    assert searched.shape() == [
        ("bf16", 19, 790),
        ("bf16, micro 8", 16, 500),
        ("bf16, micro 4", 12, 300),
        ("checkpointing 2 blocks, micro 4", 6, 200),
    ]
    confirmed = [point.confirmed for point in frontier(searched.store, searched.study)]
    assert confirmed == [True, False, False, False]


def test_only_a_confirmed_point_displaces_a_confirmed_one(searched: Searched) -> None:
    searched.trial(TF32, (16, 20, 780))
    assert [peak for _, _, peak in searched.shape()] == [780, 790, 500, 300, 200]
    searched.trial(Plan.of({"precision": "tf32"}), (16, 20, 780), purpose=Purpose.CONFIRM)
    assert [peak for _, _, peak in searched.shape()] == [780, 500, 300, 200]


def test_a_size_that_was_short_of_memory_again_is_left_out(searched: Searched) -> None:
    searched.trial(
        BF16.replace(micro_batch="8"), verdict=Verdict.OUT_OF_MEMORY, purpose=Purpose.CONFIRM
    )
    assert [peak for _, _, peak in searched.shape()] == [790, 300, 200]


@pytest.mark.parametrize("verdict", [Verdict.DRIFTED, Verdict.REFUSED])
@pytest.mark.parametrize("purpose", list(Purpose))
def test_levels_that_were_ruled_out_later_are_left_out(
    searched: Searched, verdict: Verdict, purpose: Purpose
) -> None:
    searched.trial(Plan.of({"checkpointing": "2"}), verdict=verdict, purpose=purpose)
    assert [peak for _, _, peak in searched.shape()] == [790, 500, 300]


def test_a_compiled_plan_has_the_size_it_was_measured_with(searched: Searched) -> None:
    searched.trial(COMPILED, (4, 90, 100), (8, 80, 700))
    plans = [plan for plan, _, _ in searched.shape()]
    assert plans[0] == "micro 8, full compile"
    assert not [plan for plan in plans if "compile" in plan and "micro 4" in plan]


def test_a_script_that_failed_has_no_frontier(searched: Searched) -> None:
    searched.trial(TF32, verdict=Verdict.SCRIPT_FAILED)
    assert searched.shape() == []


def test_another_budget_takes_another_point(searched: Searched) -> None:
    result, (said,) = searched.best(600)
    assert str(result.plan) == "bf16, micro 8"
    assert result.budget == 600 * MIB
    assert not result.confirmed
    assert said == (
        "the peak of 500.0 MiB was measured under a budget of 1000.0 MiB; "
        "`autofit search` with --memory 600MiB confirms what fits"
    )


def test_the_winner_stays_where_it_fits(searched: Searched) -> None:
    searched.trial(TF32, (16, 19.5, 790))
    result, _ = searched.best(795)
    assert str(result.plan) == "bf16"
    assert result.confirmed


def test_a_larger_budget_keeps_the_best(searched: Searched) -> None:
    result, (said,) = searched.best(2048)
    assert str(result.plan) == "bf16"
    assert said == (
        "this is the best plan within 1000.0 MiB; "
        "`autofit search` with --memory 2GiB may find a faster one"
    )


def test_a_study_of_exactly_this_budget_is_preferred(
    searched: Searched, studied: Callable[..., Searched]
) -> None:
    smaller = studied(600)
    smaller.trial(TWO, (16, 9, 580))
    smaller.trial(Plan.of({"checkpointing": "2"}), (16, 9, 580), purpose=Purpose.CONFIRM)
    result, said = searched.best(600)
    assert result.study == smaller.study.id
    assert said == []
    between, _ = searched.best(700)  # both fit; the larger study's point is faster
    assert between.study == searched.study.id


def test_nothing_known_fits(searched: Searched) -> None:
    with pytest.raises(NothingFits) as caught:
        searched.best(100)
    assert str(caught.value) == (
        "no known plan fits 100.0 MiB: the one with the lowest peak, 200.0 MiB, is checkpointing"
        " 2 blocks, micro 4; try `autofit search` with --memory 100MiB"
    )


def test_a_winner_without_a_confirmation_is_told(studied: Callable[..., Searched]) -> None:
    cut_short = studied()
    cut_short.trial(Plan(), (16, 10, 900))
    assert cut_short.best(1000)[1] == []  # the script as it is needs no confirmation
    cut_short.trial(BF16, (16, 20, 800))
    result, (said,) = cut_short.best(1000)
    assert not result.confirmed
    assert said.startswith("the search ended before it confirmed this plan in a new process")
