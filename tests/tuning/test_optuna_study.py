"""Optuna's copy of a study, on a real SQLite file: whole again after a kill at any point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from autofit.analysis.acquisition import Situation
from autofit.plan import Plan
from autofit.storage import Owner, Purpose, Store, StudyKey, StudyRecord, TrialRecord
from autofit.strategies import Hardware
from autofit.tuning.optuna_study import CHOICES, MEMORY, OURS, OptunaStudy
from autofit.worker.records.trials import Measurement, OutOfMemory, Script, TrialReport, Verdict

pytestmark = pytest.mark.quick

BUDGET = 1000
PLANS = [
    Plan.of({"precision": precision, "checkpointing": checkpointing, "micro_batch": "auto"})
    for precision in ("as_is", "bf16")
    for checkpointing in ("as_is", "half", "all")
]


def among(plans: Iterable[Plan]) -> Situation:
    """A choice among plans of which nothing is known."""
    return Situation(candidates=tuple(plans), finished=(), facts=None, budget=BUDGET, cuda=False)


class Killed(BaseException):
    """Stands for a kill -9: nothing after it runs."""


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
def optuna_study(store: Store, study: StudyRecord) -> OptunaStudy:
    return OptunaStudy(store, study)


@pytest.fixture
def finish(
    store: Store, study: StudyRecord, measurement: Callable[..., Measurement]
) -> Callable[..., TrialRecord]:
    """Store a finished trial, which nobody has told Optuna of yet."""

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


def told(trials: list[FrozenTrial]) -> dict[int, TrialState]:
    """Our trial to Optuna's state, for those Optuna holds as more than given up."""
    return {t.user_attrs[OURS]: t.state for t in trials if t.state is not TrialState.FAIL}


def test_the_space_holds_every_level_always(optuna_study: OptunaStudy, mirrored: Mirrored) -> None:
    assert optuna_study.ask(among(PLANS)) in PLANS
    for trial in mirrored():
        choices = {name: each.choices for name, each in trial.distributions.items()}  # type: ignore[attr-defined]
        assert choices == CHOICES


def test_optuna_suggests_what_was_chosen(optuna_study: OptunaStudy, mirrored: Mirrored) -> None:
    asked: list[Plan] = []
    while (
        plan := optuna_study.ask(among(each for each in PLANS if each not in asked))
    ) is not None:
        assert mirrored()[-1].params == plan.levels
        asked.append(plan)
    assert sorted(asked, key=PLANS.index) == PLANS
    assert [trial.state for trial in mirrored()] == [TrialState.RUNNING] * len(PLANS)


def test_without_a_choice_tpe_suggests(optuna_study: OptunaStudy, mirrored: Mirrored) -> None:
    """A study can be carried on by whoever knows Optuna alone."""
    optuna_study.ask(among(PLANS[:1]))
    trial = optuna_study._study.ask()
    levels = {name: trial.suggest_categorical(name, each) for name, each in CHOICES.items()}
    assert Plan.of(levels) in map(Plan.of, (each.params for each in mirrored()[1:]))


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "not asked"])
def test_each_verdict_has_its_state_in_optuna(
    optuna_study: OptunaStudy, finish: Finish, mirrored: Mirrored, asked: bool
) -> None:
    if asked:
        for plan in PLANS[:3]:
            assert optuna_study.ask(among([plan])) == plan
    good = finish(PLANS[0], peak=500)
    short = finish(PLANS[1], peak=1500)
    refused = finish(PLANS[2], verdict=Verdict.REFUSED)
    for trial in (good, short, refused):
        optuna_study.tell(trial)
    by_ours = {t.user_attrs[OURS]: t for t in mirrored() if OURS in t.user_attrs}
    assert by_ours[good.id].state is TrialState.COMPLETE
    assert by_ours[good.id].value == pytest.approx(8.0)
    assert by_ours[good.id].constraints == {MEMORY: pytest.approx(-0.5)}
    assert by_ours[short.id].state is TrialState.PRUNED
    assert by_ours[short.id].constraints == {MEMORY: pytest.approx(1.5)}
    assert by_ours[refused.id].state is TrialState.FAIL


def test_a_size_that_was_found_is_told_as_auto(
    optuna_study: OptunaStudy, finish: Finish, mirrored: Mirrored
) -> None:
    optuna_study.tell(finish(Plan.of({"micro_batch": "16"})))
    assert mirrored()[-1].params["micro_batch"] == "auto"


def kills(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], None]]:
    """Every place in ``OptunaStudy.tell`` where a kill can come between two commits."""

    def at(owner: object, name: str, *, after: bool = False) -> Callable[[], None]:
        plain = getattr(owner, name)

        def killed(*args: object, **kwargs: object) -> object:
            if after:
                plain(*args, **kwargs)
            raise Killed

        return lambda: monkeypatch.setattr(owner, name, killed)

    return {
        "before anything": at(optuna.Trial, "set_user_attr"),
        "after the mark": at(optuna.Trial, "set_user_attr", after=True),
        "before the constraint": at(optuna.Trial, "set_constraint"),
        "before Optuna is told": at(optuna.Study, "tell"),
        "after Optuna is told": at(optuna.Study, "tell", after=True),
        "before it is added": at(optuna.Study, "add_trial"),
        "before we know": at(Store, "set_optuna_number"),
    }


@pytest.mark.parametrize(
    "where", [name for name in kills(pytest.MonkeyPatch()) if name != "before it is added"]
)
def test_a_kill_loses_and_doubles_nothing(
    store: Store,
    study: StudyRecord,
    finish: Finish,
    mirrored: Mirrored,
    where: str,
) -> None:
    optuna_study = OptunaStudy(store, study)
    for plan in PLANS[:2]:
        optuna_study.ask(among([plan]))
    optuna_study.tell(finish(PLANS[0]))
    trial = finish(PLANS[1], peak=1500)
    with pytest.MonkeyPatch.context() as patch:
        kills(patch)[where]()
        with pytest.raises(Killed):
            optuna_study.tell(trial)
    again = OptunaStudy(store, study)
    for _ in range(2):  # the second finds nothing to do
        again.catch_up(store.trials(study, purpose=Purpose.SEARCH))
    state = TrialState.PRUNED
    found = mirrored()
    assert told([t for t in found if t.state is not TrialState.WAITING]).get(trial.id) is state
    counted = [t for t in found if t.user_attrs.get(OURS) == trial.id and t.state is state]
    assert len(counted) == 1
    assert TrialState.RUNNING not in {t.state for t in found}
    kept = {t.id: t.optuna_number for t in store.trials(study)}
    assert kept[trial.id] == counted[0].number
    assert again.ask(among(PLANS[2:])) in PLANS[2:]


def test_two_kills_in_a_row_lose_nothing(
    store: Store, study: StudyRecord, finish: Finish, mirrored: Mirrored
) -> None:
    """The first leaves a trial half-told; the second comes once that one has been given up."""
    optuna_study = OptunaStudy(store, study)
    assert optuna_study.ask(among(PLANS[:1])) == PLANS[0]
    trial = finish(PLANS[0], peak=1500)
    with pytest.MonkeyPatch.context() as patch:
        kills(patch)["before Optuna is told"]()
        with pytest.raises(Killed):
            optuna_study.tell(trial)
    with pytest.MonkeyPatch.context() as patch:
        kills(patch)["before it is added"]()
        again = OptunaStudy(store, study)
        with pytest.raises(Killed):
            again.catch_up(store.trials(study))
    OptunaStudy(store, study).catch_up(store.trials(study))
    assert told(mirrored()) == {trial.id: TrialState.PRUNED}
