"""What samplers are asked, and the copy of a study in Optuna's tables, on a real SQLite file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from autofit.analysis.candidates import AskingLaunch, SearchSnapshot
from autofit.exceptions import UsageError
from autofit.plan import Plan
from autofit.space.catalogue import Space
from autofit.storage import Owner, Store, StudyKey, StudyRecord, TrialRecord
from autofit.strategies import Hardware
from autofit.tuning.optuna_study import MEMORY, Dashboard, delete_study, name_of, study_of
from autofit.tuning.sampler import Suggestions
from autofit.worker.records.trials import (
    HORIZON,
    Measurement,
    OutOfMemory,
    Script,
    TrialReport,
    Verdict,
)

pytestmark = pytest.mark.quick

BUDGET = 1000
PRECISIONS = ("as_is", "bf16")
CHECKPOINTING = ("as_is", "auto", "all")
SPACE = Space(
    levels=(
        ("precision", PRECISIONS),
        ("checkpointing", CHECKPOINTING),
        ("micro_batch", ("as_is", "auto")),
    )
)
NUMBERS = {"checkpointing": "auto", "micro_batch": "auto"}
SEARCHED = [Plan.of({"precision": p, **NUMBERS}) for p in PRECISIONS]
"""The plans that a search combines: their numbers are found in the trial."""
PLANS = [
    Plan.of({"precision": precision, "checkpointing": checkpointing, "micro_batch": "auto"})
    for precision in PRECISIONS
    for checkpointing in CHECKPOINTING
]


def among(
    finished: Iterable[TrialRecord] = (), running: Iterable[Plan] = (), space: Space = SPACE
) -> SearchSnapshot:
    """The state of a search of ``SPACE`` after some trials."""
    return SearchSnapshot(
        space=space,
        finished=tuple(finished),
        running=frozenset(running),
        facts=None,
        budget=BUDGET,
        cuda=False,
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(str(tmp_path / "autofit.db")) as store:
        yield store


@pytest.fixture
def study(store: Store, tmp_path: Path) -> StudyRecord:
    script = Script(target="train.py", cwd=str(tmp_path))
    (tmp_path / "train.py").touch()
    return store.open_study(
        StudyKey.of(script, gpu="a CPU", gpus=1, memory=BUDGET, allow="rounding"),
        script=script,
        hardware=Hardware(device="cpu", name="a CPU", total_bytes=1 << 30),
        budget=BUDGET,
        versions={},
    )


@pytest.fixture
def finish(
    store: Store, study: StudyRecord, measurement: Callable[..., Measurement]
) -> Callable[..., TrialRecord]:
    """Store a finished trial."""

    def finish(plan: Plan, peak: int = 500, verdict: Verdict | None = None) -> TrialRecord:
        fits = peak <= BUDGET
        verdict = verdict or (Verdict.MEASURED if fits else Verdict.OUT_OF_MEMORY)
        measured = verdict is Verdict.MEASURED
        short = OutOfMemory(phase="forward", message="no memory", requested=peak)
        report = TrialReport(
            index=0,
            plan=plan,
            verdict=verdict,
            best=plan if measured else None,
            measurements=(measurement(8, peak=peak),) if measured else (),
            out_of_memory=short if verdict is Verdict.OUT_OF_MEMORY else None,
        )
        (trial,) = store.add_trials(study, [plan], launch=0, owner=Owner.current())
        return store.finish(trial, report)

    return finish


@pytest.fixture
def mirrored(store: Store) -> Callable[[], list[FrozenTrial]]:
    """Read Optuna's trials as another program would."""

    def read() -> list[FrozenTrial]:
        storage = optuna.storages.RDBStorage(store.url)
        (summary,) = optuna.get_all_study_names(storage)
        return optuna.load_study(study_name=summary, storage=storage).get_trials()

    return read


Finish = Callable[..., TrialRecord]
Mirrored = Callable[[], list[FrozenTrial]]


# --- asking -----------------------------------------------------------------------------------


def test_every_plan_is_suggested_once() -> None:
    suggestions, asked = Suggestions(), list[Plan]()
    while (plan := suggestions.next(among(running=asked))) is not None:
        asked.append(plan)
    assert sorted(map(str, asked)) == sorted(map(str, SEARCHED))


def test_a_study_holds_what_is_known(finish: Finish) -> None:
    """The parameters are the levels that may be tried, and those that were."""
    done = [
        finish(Plan.of({"precision": "tf32"})),
        finish(PLANS[1].replace(micro_batch="16"), peak=1500),
        finish(PLANS[2], verdict=Verdict.REFUSED),
    ]
    study = study_of(among(done, running=[PLANS[3]]), optuna.samplers.RandomSampler())
    good, short, refused, runs = study.get_trials()
    assert good.params == {
        "precision": "tf32",
        "checkpointing": "as_is",
        "micro_batch": "as_is",
    }
    assert good.distributions["precision"].choices == (*PRECISIONS, "tf32")  # type: ignore[attr-defined]
    assert good.state is TrialState.COMPLETE
    assert good.constraints == {MEMORY: pytest.approx(-0.5)}
    assert good.value == pytest.approx(1 / 8.0), "seconds a sample"
    assert short.state is TrialState.PRUNED
    assert short.constraints == {MEMORY: pytest.approx(1.5)}
    assert short.params["micro_batch"] == "auto", "a size that was found"
    assert refused.state is TrialState.FAIL
    assert runs.state is TrialState.RUNNING


def test_levels_that_are_left_out_later_are_not_suggested(finish: Finish) -> None:
    wide = Space(levels=(("precision", (*PRECISIONS, "tf32")), ("micro_batch", ("as_is", "auto"))))
    done = [finish(Plan.of({"precision": "tf32", "micro_batch": "auto"}))]
    assert Suggestions().next(among(done, space=wide)) in {*wide.plans()} - {done[0].plan}
    narrow = Space(levels=(("precision", PRECISIONS), ("micro_batch", ("as_is", "auto"))))
    for name in ("autofit", "random"):
        plan = Suggestions(name).next(among(done, space=narrow))
        assert plan is not None
        assert plan["precision"] in PRECISIONS


@pytest.mark.parametrize("name", ["tpe", "optuna.samplers:RandomSampler"])
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_other_samplers_propose_what_is_not_known(finish: Finish, name: str) -> None:
    """A plan is measured once. A proposal that is known costs no trial."""
    space = Space(levels=SPACE.levels[:2])
    suggestions = Suggestions(name)
    done = [finish(Plan())]
    while (plan := suggestions.next(among(done, space=space))) is not None:
        assert plan not in {trial.plan for trial in done}
        done.append(finish(plan, peak=500 + 200 * len(done)))
    assert len(done) >= 4, "most of the six plans"


def test_a_plan_that_needs_a_new_launch_waits_for_it() -> None:
    space = Space(levels=(("optimizer", ("as_is", "lion")),))
    suggestions = Suggestions("random")
    state = among(running=[Plan()], space=space)
    assert suggestions.next(state, AskingLaunch()) is None, "lion must be there from the start"
    assert suggestions.has_plan(state)
    assert suggestions.next(state) == Plan.of({"optimizer": "lion"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("best", "give autofit, tpe, gp, random, or module:Class"),
        ("no_such_module:Sampler", "No module named 'no_such_module'"),
        ("optuna.samplers:NoSampler", "has no attribute 'NoSampler'"),
        ("collections:Counter", "it is not a subclass of optuna.samplers.BaseSampler"),
    ],
)
def test_a_sampler_that_is_none_is_a_usage_error(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Suggestions(name)


# --- the copy for dashboards ------------------------------------------------------------------


def test_a_copy_lacks_nothing_after_a_kill(
    store: Store, study: StudyRecord, finish: Finish, mirrored: Mirrored
) -> None:
    """A kill comes before a trial is written; another process then carries the search on."""
    copy = Dashboard(store, study, horizon=HORIZON)
    done = [finish(PLANS[0]), finish(PLANS[1], peak=1500), finish(PLANS[2])]
    copy.tell(done[0])
    report = done[0].report
    assert report is not None
    slower = replace(report, measurements=report.measurements * 2)
    store.amend(done[0], slower)
    again = Dashboard(store, study, horizon=HORIZON)
    done.append(finish(PLANS[3]))
    again.tell(done[-1])
    copied = mirrored()
    assert [trial.user_attrs["autofit_trial"] for trial in copied] == [each.id for each in done]
    assert copied[1].state is TrialState.PRUNED
    once = sum(report.measurements[0].step_seconds)
    assert copied[0].user_attrs["seconds"]["steps"] == pytest.approx(2 * once)


def test_a_copy_that_somebody_deletes_is_written_again(
    store: Store, study: StudyRecord, finish: Finish, mirrored: Mirrored
) -> None:
    copy = Dashboard(store, study, horizon=HORIZON)
    done = [finish(PLANS[0]), finish(PLANS[1])]
    copy.tell(done[0])
    optuna.delete_study(study_name=name_of(study), storage=store.url)
    copy.tell(done[1])
    assert [trial.user_attrs["autofit_trial"] for trial in mirrored()] == [t.id for t in done]


def test_a_resumed_search_adds_only_what_its_copy_lacks(
    store: Store, study: StudyRecord, finish: Finish, mirrored: Mirrored
) -> None:
    done = [finish(PLANS[0]), finish(PLANS[1], peak=1500)]
    Dashboard(store, study, horizon=HORIZON)
    before = [trial.datetime_complete for trial in mirrored()]
    done.append(finish(PLANS[2]))
    Dashboard(store, study, horizon=HORIZON)
    assert [trial.user_attrs["autofit_trial"] for trial in mirrored()] == [t.id for t in done]
    assert [trial.datetime_complete for trial in mirrored()][:2] == before


def test_a_number_that_no_strategy_lists_is_copied(
    store: Store, study: StudyRecord, finish: Finish, mirrored: Mirrored
) -> None:
    copy = Dashboard(store, study, horizon=HORIZON)
    plans = [PLANS[0], Plan.of({"ranks": "3"}), PLANS[1]]
    for plan in plans:
        copy.tell(finish(plan))
    assert [trial.params["ranks"] for trial in mirrored()] == ["as_is", "3", "as_is"]


def test_two_studies_have_a_copy_each(store: Store, study: StudyRecord, tmp_path: Path) -> None:
    other = store.open_study(
        replace(study.key, memory=None),
        script=study.script,
        hardware=study.hardware,
        budget=BUDGET,
        versions={},
    )
    for each in (study, other, study):
        Dashboard(store, each, horizon=HORIZON)
    assert len(optuna.get_all_study_names(store.url)) == 2
    delete_study(store, study)
    (left,) = optuna.get_all_study_names(store.url)
    assert other.id in left
