"""Optuna's copy of a study, on a real SQLite file: whole again after a kill at any point."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from autofit.analysis.candidates import Launch, SearchState
from autofit.exceptions import UsageError
from autofit.plan import Plan
from autofit.space.catalogue import Space
from autofit.storage import Owner, Purpose, State, Store, StudyKey, StudyRecord, TrialRecord
from autofit.strategies import Hardware
from autofit.tuning.attributes import MEMORY, Attribute
from autofit.tuning.optuna_study import KNOWN, OptunaStudy, name_of
from autofit.tuning.sampler import state_of
from autofit.worker.records.trials import Measurement, OutOfMemory, Script, TrialReport, Verdict

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
) -> SearchState:
    """The state of a search of ``SPACE`` after some trials."""
    return SearchState(
        space=space,
        finished=tuple(finished),
        running=frozenset(running),
        facts=None,
        budget=BUDGET,
        cuda=False,
    )


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
    found = [
        t for t in trials if t.state is not TrialState.FAIL and Attribute.RECORD in t.user_attrs
    ]
    return {trial.user_attrs[Attribute.RECORD]: trial.state for trial in found}


def test_the_parameters_are_the_levels_that_may_be_tried(
    optuna_study: OptunaStudy, mirrored: Mirrored
) -> None:
    assert optuna_study.ask(among()) in PLANS
    (trial,) = mirrored()
    choices = {name: each.choices for name, each in trial.distributions.items()}  # type: ignore[attr-defined]
    assert choices == dict(SPACE.levels)


def test_every_plan_is_asked_for_once(optuna_study: OptunaStudy, mirrored: Mirrored) -> None:
    asked: list[Plan] = []
    while (plan := optuna_study.ask(among(running=asked))) is not None:
        assert {**Plan().levels, **mirrored()[-1].params} == plan.levels
        asked.append(plan)
    assert sorted(map(str, asked)) == sorted(map(str, SEARCHED))
    assert [trial.state for trial in mirrored()] == [TrialState.RUNNING] * len(SEARCHED)


def test_a_fixed_start_is_enqueued(optuna_study: OptunaStudy, mirrored: Mirrored) -> None:
    small = PLANS[4].replace(micro_batch="2")
    assert optuna_study.ask(among(), start=small) == small
    (trial,) = mirrored()
    assert trial.system_attrs["fixed_params"]["micro_batch"] == "auto"
    assert optuna_study.ask(among(running=[small])) in PLANS


def test_a_parameter_whose_choices_grow_is_another_one(
    optuna_study: OptunaStudy, finish: Finish, mirrored: Mirrored
) -> None:
    """Optuna refuses other choices for a parameter that it knows."""
    narrow = Space(levels=(("precision", PRECISIONS), ("micro_batch", ("as_is", "auto"))))
    first = optuna_study.ask(among(space=narrow))
    assert first is not None
    optuna_study.tell(finish(first))
    wide = Space(levels=(("precision", (*PRECISIONS, "tf32")), ("micro_batch", ("as_is", "auto"))))
    left = {plan for plan in wide.plans() if plan != first}
    assert optuna_study.ask(among(space=wide)) in left
    assert set(mirrored()[-1].params) == {"precision 2", "micro_batch"}


@pytest.mark.parametrize("name", ["tpe", "optuna.samplers:RandomSampler"])
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_other_samplers_propose_what_is_not_known(
    store: Store, study: StudyRecord, finish: Finish, mirrored: Mirrored, name: str
) -> None:
    """A plan is measured once. A proposal that is known costs no trial."""
    space = Space(levels=SPACE.levels[:2])
    optuna_study = OptunaStudy(store, study, sampler=name)
    baseline = optuna_study.ask(among(space=space), start=Plan())
    assert baseline is not None
    done = [finish(baseline)]
    optuna_study.tell(done[0])
    while (plan := optuna_study.ask(among(done, space=space))) is not None:
        assert plan not in {trial.plan for trial in done}
        done.append(finish(plan, peak=500 + 200 * len(done)))
        optuna_study.tell(done[-1])
    assert len(done) >= 4, "most of the six plans"
    assert len(told(mirrored())) == len(done)
    assert len(mirrored()) <= len(done) * KNOWN


def test_a_plan_that_needs_a_new_launch_waits_for_it(store: Store, study: StudyRecord) -> None:
    space = Space(levels=(("optimizer", ("as_is", "lion")),))
    optuna_study = OptunaStudy(store, study, sampler="random")
    optuna_study.ask(among(space=space), start=Plan())
    state = among(running=[Plan()], space=space)
    assert optuna_study.ask(state, Launch()) is None, "lion must be there from the start"
    assert optuna_study.has_plan(state)
    assert optuna_study.ask(state) == Plan.of({"optimizer": "lion"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("best", "give autofit, tpe, gp, random, or module:Class"),
        ("no_such_module:Sampler", "No module named 'no_such_module'"),
        ("optuna.samplers:NoSampler", "has no attribute 'NoSampler'"),
        ("collections:Counter", "it is no optuna.samplers.BaseSampler"),
    ],
)
def test_a_sampler_that_is_none_is_a_usage_error(
    store: Store, study: StudyRecord, name: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        OptunaStudy(store, study, sampler=name)


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "not asked"])
def test_each_verdict_has_its_state_in_optuna(
    optuna_study: OptunaStudy, finish: Finish, mirrored: Mirrored, asked: bool
) -> None:
    if asked:
        for plan in PLANS[:3]:
            assert optuna_study.ask(among(), start=plan) == plan
    good = finish(PLANS[0], peak=500)
    short = finish(PLANS[1], peak=1500)
    refused = finish(PLANS[2], verdict=Verdict.REFUSED)
    for trial in (good, short, refused):
        optuna_study.tell(trial)
    by_ours = {
        t.user_attrs[Attribute.RECORD]: t for t in mirrored() if Attribute.RECORD in t.user_attrs
    }
    assert by_ours[good.id].state is TrialState.COMPLETE
    assert by_ours[good.id].value == pytest.approx(1 / 8.0), "seconds a sample"
    assert by_ours[good.id].params == (
        {"precision": "as_is", "checkpointing": "as_is", "micro_batch": "auto"} if asked else {}
    )
    assert by_ours[good.id].constraints == {MEMORY: pytest.approx(-0.5)}
    assert by_ours[short.id].state is TrialState.PRUNED
    assert by_ours[short.id].constraints == {MEMORY: pytest.approx(1.5)}
    assert by_ours[refused.id].state is TrialState.FAIL


def test_a_size_that_was_found_is_told_as_auto(
    optuna_study: OptunaStudy, finish: Finish, mirrored: Mirrored
) -> None:
    optuna_study.ask(among())
    optuna_study.tell(finish(PLANS[0].replace(micro_batch="16")))
    assert mirrored()[-1].params["micro_batch"] == "auto"


def test_what_real_steps_have_shown_reaches_the_sampler(
    store: Store, study: StudyRecord, finish: Finish
) -> None:
    """Optuna keeps what it was told, so the change stands beside it; also after a kill."""
    optuna_study = OptunaStudy(store, study)
    optuna_study.ask(among(), start=SEARCHED[0])
    trial = finish(SEARCHED[0])
    optuna_study.tell(trial)
    optuna_study.amended(store.trials(study))
    name = name_of(study)
    read = functools.partial(
        optuna.load_study, study_name=name, storage=optuna.storages.RDBStorage(store.url)
    )
    assert state_of(read()).finished[0].report == trial.report
    assert trial.report is not None
    slower = replace(trial.report, measurements=(*trial.report.measurements,) * 2)
    amended = store.amend(trial, slower)
    for again in (optuna_study, OptunaStudy(store, study)):
        if again is optuna_study:
            again.amended([amended])
        else:
            again.catch_up(store.trials(study))
        (found,) = state_of(read()).finished
        assert found.report == slower
    optuna_study.amended([trial])
    assert state_of(read()).finished[0].report == trial.report


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
        "before it is asked for again": at(optuna.Study, "enqueue_trial"),
        "after it is enqueued": at(optuna.Study, "enqueue_trial", after=True),
        "before we know": at(Store, "set_optuna_number"),
    }


@pytest.mark.parametrize(
    "where",
    [name for name in kills(pytest.MonkeyPatch()) if "enqueue" not in name and "again" not in name],
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
        optuna_study.ask(among(), start=plan)
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
    counted = [
        t for t in found if t.user_attrs.get(Attribute.RECORD) == trial.id and t.state is state
    ]
    assert len(counted) == 1
    assert TrialState.RUNNING not in {t.state for t in found}
    kept = {t.id: t.optuna_number for t in store.trials(study)}
    assert kept[trial.id] == counted[0].number
    finished = store.trials(study, state=State.FINISHED)
    assert again.ask(among(finished)) in PLANS[2:]


@pytest.mark.parametrize("second", ["before it is asked for again", "after it is enqueued"])
def test_two_kills_in_a_row_lose_nothing(
    store: Store, study: StudyRecord, finish: Finish, mirrored: Mirrored, second: str
) -> None:
    """The first leaves a trial half-told; the second comes once that one has been given up."""
    optuna_study = OptunaStudy(store, study)
    assert optuna_study.ask(among(), start=PLANS[0]) == PLANS[0]
    trial = finish(PLANS[0], peak=1500)
    with pytest.MonkeyPatch.context() as patch:
        kills(patch)["before Optuna is told"]()
        with pytest.raises(Killed):
            optuna_study.tell(trial)
    with pytest.MonkeyPatch.context() as patch:
        kills(patch)[second]()
        again = OptunaStudy(store, study)
        with pytest.raises(Killed):
            again.catch_up(store.trials(study))
    OptunaStudy(store, study).catch_up(store.trials(study))
    assert told(mirrored()) == {trial.id: TrialState.PRUNED}
