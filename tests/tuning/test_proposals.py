"""Which plan is proposed next, on a real store: decisions for GPUs need none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autofit.analysis.candidates import Launch
from autofit.plan import Plan
from autofit.storage import Owner, Purpose, Store, StudyKey, TrialRecord
from autofit.strategies import Facts, Fidelity, Hardware, RootFacts
from autofit.tuning.history import History
from autofit.tuning.messages import hardly_fits
from autofit.tuning.notices import LevelsLeftOut, Line, Notice
from autofit.tuning.options import SearchOptions
from autofit.tuning.proposals import Proposer
from autofit.tuning.reference import PARTS
from autofit.worker.records.trials import Measurement, OutOfMemory, Script, TrialReport, Verdict

pytestmark = pytest.mark.quick

GIB = 1 << 30
GPU = Hardware(device="cuda", name="a GPU", total_bytes=80 * GIB, capability=(9, 0))
ROOT = RootFacts(
    name="Net",
    parameters=GIB // 4,
    parameter_bytes=GIB,
    trainable=GIB // 4,
    dtype="float32",
    batch=32,
    blocks=24,
)


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    """A study on GPUs whose script has run out of memory as it is."""
    (tmp_path / "train.py").touch()
    script = Script(target="train.py", cwd=str(tmp_path))
    with Store(str(tmp_path / "autofit.db")) as store:
        study = store.open_study(
            StudyKey.of(script, gpu="a GPU", gpus=2, memory=6 * GIB, allow="rounding"),
            script=script,
            hardware=GPU,
            budget=6 * GIB,
            versions={},
        )
        options = SearchOptions(script=script, storage=store.url, allow=Fidelity.ROUNDING)
        held = History(store, study, options, lambda _: None, 0.0)
        held.learn(Facts(roots=(ROOT,), optimizers=("AdamW",)))
        (trial,) = store.add_trials(study, [Plan()], launch=0, owner=Owner.current())
        short = OutOfMemory(phase="forward", message="no memory", requested=GIB)
        report = TrialReport(
            index=0, plan=Plan(), verdict=Verdict.OUT_OF_MEMORY, out_of_memory=short
        )
        store.finish(trial, report)
        yield held


def test_what_others_are_compared_with_is_launched_once(history: History) -> None:
    """In small parts, as it cannot win. A second card measures another plan meanwhile."""
    proposer = Proposer(history, GPU)
    first = proposer.next()
    assert first is not None
    assert first["micro_batch"] == str(32 // PARTS)
    history.store.add_trials(history.study, [first], launch=1, owner=Owner.current())
    for launch in (None, Launch(), Launch(fresh=True)):
        second = proposer.next(launch)
        assert second is not None
        assert second.fidelity() is Fidelity.ROUNDING, "the reference would be exact"


def test_what_drops_is_compared_as_well(history: History) -> None:
    drops = replace(ROOT, dropout=True)
    history.learn(Facts(roots=(drops,), optimizers=("AdamW",), stepped=True))
    first = Proposer(history, GPU).next(Launch(fresh=True))
    assert first is not None
    assert first.fidelity(history.study.facts) is Fidelity.REDRAW


def test_of_levels_that_refine_only_those_asked_for_are_news(history: History) -> None:
    def told(only: frozenset[str]) -> set[str]:
        heard: list[Notice] = []
        history.options = replace(history.options, only=only)
        history.tell = heard.append
        Proposer(history, GPU).next()
        return {r[0] for each in heard if isinstance(each, LevelsLeftOut) for r in each.reasons}

    assert "loss" not in told(frozenset())
    assert told(frozenset({"loss", "micro_batch"})) == {"loss"}


def test_what_runs_is_outdone_where_nothing_of_it_would_be_begun(
    history: History, measurement: Callable[..., Measurement]
) -> None:
    """Not because of one another: of two that promise as much, either would be begun."""

    def begun(plan: Plan) -> TrialRecord:
        (trial,) = history.store.add_trials(history.study, [plan], launch=1, owner=Owner.current())
        return trial

    def ends(trial: TrialRecord, seconds: float) -> None:
        found = (measurement(32, seconds, 2 * GIB),)
        verdict = Verdict.MEASURED
        report = TrialReport(index=0, plan=trial.plan, verdict=verdict, measurements=found)
        history.finish(trial, report, 0)

    history.options = replace(history.options, only=frozenset({"precision", "micro_batch"}))
    split = Plan.of({"micro_batch": "auto"})
    narrow = [split.replace(precision=name) for name in ("tf32", "bf16")]
    proposer, first = Proposer(history, GPU), begun(split)
    running = [begun(plan) for plan in narrow]
    assert not proposer.nothing_worth_running()
    ends(first, 1.0)
    assert not proposer.nothing_worth_running()
    ends(running[1], 0.1)
    assert proposer.nothing_worth_running(), "tf32 alone will not be faster"


@pytest.mark.parametrize(
    ("retries", "seconds", "relieved"),
    [(5, 3.0, True), (2, 3.0, False), (5, 1.0, False)],
    ids=["tight and slower", "slower", "tight"],
)
def test_what_hardly_fits_when_measured_again_is_relieved(
    history: History,
    measurement: Callable[..., Measurement],
    retries: int,
    seconds: float,
    relieved: bool,
) -> None:
    """It was fast in a process with room to spare, and is not in one of its own."""
    told: list[str] = []

    def listen(notice: Notice) -> None:
        told.extend([notice.text] if isinstance(notice, Line) else [])

    def ends(plan: Plan, purpose: Purpose, retries: int, seconds: float) -> None:
        (trial,) = history.store.add_trials(
            history.study, [plan], launch=1, owner=Owner.current(), purpose=purpose
        )
        tight = replace(
            measurement(32, seconds, 6 * GIB - 1),
            allocation_retries=retries,
            peak_allocated=4 * GIB,
            peak_reserved=5 * GIB,
        )
        report = TrialReport(index=0, plan=plan, verdict=Verdict.MEASURED, measurements=(tight,))
        history.finish(trial, report, 0)

    history.learn(
        Facts(roots=(replace(ROOT, batch_norm=True),), optimizers=("AdamW",), stepped=True)
    )
    history.options = replace(history.options, only=frozenset({"checkpointing", "allocator"}))
    lean, proposer = Plan.of({"checkpointing": "all"}), Proposer(history, GPU)
    history.tell = listen
    ends(lean, Purpose.SEARCH, 0, 1.0)
    ends(Plan.of({"checkpointing": "auto"}), Purpose.SEARCH, 0, 1.2)
    assert proposer.next() is None
    assert history.ranked_sound()[0].plan == lean
    ends(lean, Purpose.CONFIRM, retries, seconds)
    if relieved:
        assert proposer.next() == lean.replace(allocator="expandable")
        assert history.ranked_sound()[0].plan != lean, "another is faster"
        assert told == [hardly_fits(lean)]
    else:
        assert proposer.next() is None
        assert history.ranked_sound()[0].plan == lean
        assert told == []
