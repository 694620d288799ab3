"""Trials side by side, on two CPU slots: the driver's part is the same with two GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from autofit.analysis import acquisition
from autofit.analysis.candidates import AskingLaunch
from autofit.exceptions import UsageError, WorkerError
from autofit.storage import Purpose, State, Store
from autofit.tuning import local_slots
from autofit.tuning.controller import search
from autofit.tuning.notices import (
    Notice,
    StudyStarted,
    TrialDropped,
    TrialEnded,
    TrialStarted,
)
from autofit.tuning.options import SearchOptions
from autofit.tuning.proposals import Proposer
from autofit.worker.cluster.pool import Pool
from autofit.worker.records.trials import LaunchEnded, LaunchRequest, Script, Verdict


@pytest.fixture
def options(script: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> SearchOptions:
    """A search of some plans on two slots."""
    monkeypatch.setattr(local_slots, "CPU_SLOTS", 2)
    path = script()
    return SearchOptions(
        script=Script(target=path.name, args=("--steps", "400"), cwd=str(path.parent)),
        storage=f"sqlite:///{path.parent / 'autofit.db'}",
        trials=8,
    )


@pytest.mark.full
@pytest.mark.usefixtures("ray_host")
def test_every_slot_is_kept_busy_with_plans_of_its_own(
    options: SearchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        acquisition, "worthwhile", acquisition.prospects
    )  # whatever is not dominated is measured
    heard: list[Notice] = []
    result = search(options, heard.append)
    assert isinstance(heard[0], StudyStarted)
    assert heard[0].devices == 2
    plans = [each.report.plan for each in heard if isinstance(each, TrialEnded)]
    assert len(plans) == len(set(plans)) >= 3
    running: Counter[int] = Counter()
    side_by_side = False
    for each in heard:
        if isinstance(each, TrialStarted):
            running[each.slot] += 1
            side_by_side |= len(+running) == 2
        elif isinstance(each, TrialEnded):
            running[each.slot] -= 1
    assert side_by_side
    assert result.baseline_verdict is Verdict.MEASURED


def ended(**why: str) -> LaunchEnded:
    return LaunchEnded(steps=0, stopped=False, seconds=1.0, **why)  # type: ignore[arg-type]


@pytest.mark.quick
def test_a_slot_whose_card_is_lost_is_not_used_again(options: SearchOptions) -> None:
    said: list[str] = []
    slots = local_slots.LocalSlots(options)
    assert slots.idle({1}) == [0]
    assert not slots.handle_end(0, ended(), said.append)
    assert slots.handle_end(0, ended(lost="GPU 0 has 1.0 GiB free"), said.append)
    assert slots.idle(()) == [1]
    assert said == ["GPU 0 has 1.0 GiB free. The search does not use it any more."]
    assert slots.handle_end(1, ended(lost="GPU 1 has 2.0 GiB free"), said.append)
    assert slots.idle(()), "whoever has work left is told by the next launch"
    with pytest.raises(WorkerError, match=r"no device is left: GPU 0 .*; GPU 1 "):
        slots.workers(ExitStack())


@pytest.mark.quick
def test_memory_that_others_take_again_and_again_ends_the_search(options: SearchOptions) -> None:
    said: list[str] = []
    slots = local_slots.LocalSlots(options)
    for _ in range(local_slots.MAX_INTERRUPTED):
        assert slots.handle_end(0, ended(taken="GPU 0: another process took memory"), said.append)
    assert slots.idle(()) == [0, 1]
    with pytest.raises(WorkerError, match="other processes keep taking the memory: GPU 0: another"):
        slots.handle_end(0, ended(taken="GPU 0: another process took memory"), said.append)


@pytest.mark.quick
def test_gpus_that_are_not_there_are_refused(options: SearchOptions) -> None:
    assert local_slots.LocalSlots(options).lines == ()
    with pytest.raises(UsageError, match=r"--gpus 4: no GPU is visible; .* --device cpu"):
        local_slots.LocalSlots(replace(options, gpus=4))
    options = replace(options, gpus=4, device="cpu")
    slots = local_slots.LocalSlots(options)
    assert slots.lines == (local_slots.ONE_FIRST.format(4),)
    assert slots.spread == 4
    assert local_slots.LocalSlots(replace(options, gpus_per_trial=1)).spread == 1


@pytest.mark.full
@pytest.mark.usefixtures("ray_host")
def test_the_script_is_started_ahead_of_its_plans(
    options: SearchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the other slots, while the script as it is runs on one; at the end for the last word."""
    monkeypatch.setattr(local_slots, "CPU_SLOTS", 3)
    monkeypatch.setattr(acquisition, "worthwhile", acquisition.prospects)
    asked: list[LaunchRequest] = []
    plain = Pool.submit

    def noted(pool: Pool, slot: int, request: LaunchRequest) -> None:
        asked.append(request)
        plain(pool, slot, request)

    monkeypatch.setattr(Pool, "submit", noted)
    result = search(options)
    first, *others = asked
    assert not first.waits
    assert [each.waits for each in others[:2]] == [True, True]
    with Store(options.storage) as store:
        study = store.study(result.study)
        found = store.trials(study, state=State.FINISHED)
        last = store.trials(study, state=State.FINISHED, purpose=Purpose.CONFIRM)
    assert {trial.launch for trial in found} >= {1, 2}, "those started ahead had plans"
    assert last
    assert len(asked) == result.launches


@pytest.mark.full
@pytest.mark.usefixtures("ray_host")
def test_a_launch_waits_while_others_may_show_what_comes_next(
    options: SearchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second question of a launch has no answer at first, and no launch ends for that."""
    monkeypatch.setattr(acquisition, "worthwhile", acquisition.prospects)
    plain, times = Proposer.next, Counter[bool]()

    def hesitant(proposer: Proposer, launch: AskingLaunch | None = None) -> object:
        times[launch is None] += 1
        if launch is not None and times[False] % 2 and proposer.known()[1]:  # while others run
            return None
        return plain(proposer, launch)

    monkeypatch.setattr(Proposer, "next", hesitant)
    monkeypatch.setattr(Proposer, "wants_launch", lambda proposer: False)
    result = search(options)
    with Store(options.storage) as store:
        found = store.trials(store.study(result.study), state=State.FINISHED)
    searched = [trial for trial in found if trial.purpose is Purpose.SEARCH]
    assert len(searched) >= 5
    assert len({trial.launch for trial in searched}) == 2, "one a slot"


@pytest.mark.full
@pytest.mark.usefixtures("ray_host")
def test_a_trial_that_would_not_be_begun_by_now_is_not_waited_for(
    options: SearchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot goes on with what comes next, and the store does not take it for measured."""
    monkeypatch.setattr(acquisition, "worthwhile", acquisition.prospects)
    times: Counter[bool] = Counter()

    def once(proposer: Proposer) -> bool:
        """Whether something runs that began a moment ago; the first time."""
        finished, running, *_ = proposer.known()
        due = not times[True] and bool(finished and running)
        times[due] += 1
        return due

    monkeypatch.setattr(Proposer, "nothing_worth_running", once)
    heard: list[Notice] = []
    result = search(options, heard.append)
    dropped = [each for each in heard if isinstance(each, TrialDropped)]
    assert dropped
    after = heard[heard.index(dropped[-1]) :]
    slots = {each.slot for each in dropped}
    assert slots <= {each.slot for each in after if isinstance(each, TrialStarted)}
    with Store(options.storage) as store:
        found = store.trials(store.study(result.study))
    assert {trial.state for trial in found} == {State.FINISHED}, "a dropped trial is none"
    (study,) = optuna.study.get_all_study_names(options.storage)
    trials = optuna.load_study(study_name=study, storage=options.storage).trials
    assert optuna.trial.TrialState.RUNNING not in {trial.state for trial in trials}
