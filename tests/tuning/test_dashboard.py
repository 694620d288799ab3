"""A finished search in the eyes of Optuna's public interface and of optuna-dashboard."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from autofit.storage import Purpose, State, Store, StudyRecord

pytestmark = pytest.mark.full

Ask = Callable[[str], Any]


@pytest.fixture(scope="module")
def storage(searched_folder: Path) -> optuna.storages.RDBStorage:
    """The store of a finished search, as Optuna opens it."""
    return optuna.storages.RDBStorage(f"sqlite:///{searched_folder / 'autofit.db'}")


@pytest.fixture(scope="module")
def study(searched_folder: Path) -> StudyRecord:
    """The study in autofit's tables."""
    with Store(str(searched_folder / "autofit.db"), create=False) as store:
        return store.studies()[0]


@pytest.fixture(scope="module")
def trials(storage: optuna.storages.RDBStorage) -> list[FrozenTrial]:
    """The trials that the search told Optuna."""
    (summary,) = optuna.get_all_study_summaries(storage)
    return optuna.load_study(study_name=summary.study_name, storage=storage).get_trials()


def ended(trials: list[FrozenTrial], state: TrialState) -> list[FrozenTrial]:
    return [trial for trial in trials if trial.state is state]


def test_a_study_is_found_by_script_and_budget(
    storage: optuna.storages.RDBStorage, study: StudyRecord
) -> None:
    (found,) = optuna.get_all_study_summaries(storage)
    assert found.study_name.startswith("train.py")
    assert study.id in found.study_name
    assert found.direction is optuna.study.StudyDirection.MINIMIZE
    assert found.user_attrs["budget_bytes"] == study.budget
    assert found.best_trial is not None
    assert found.best_trial.user_attrs["verdict"] == "measured"


def test_values_are_seconds_a_sample(trials: list[FrozenTrial]) -> None:
    measured = ended(trials, TrialState.COMPLETE)
    assert measured
    for trial in measured:
        assert trial.value == pytest.approx(1 / trial.user_attrs["samples_per_second"])
        assert trial.user_attrs["description"]


def test_the_constraint_tells_what_fits(trials: list[FrozenTrial], study: StudyRecord) -> None:
    for trial in ended(trials, TrialState.COMPLETE):
        share = trial.user_attrs["peak_device_bytes"] / study.budget
        assert trial.constraints["memory"] == pytest.approx(share - 1)
        assert share <= 1
    pruned = ended(trials, TrialState.PRUNED)
    assert pruned, "the script does not fit as it is"
    assert {trial.user_attrs["verdict"] for trial in pruned} == {"out_of_memory"}
    assert all(trial.constraints["memory"] > 0 for trial in pruned)


def test_each_trial_has_the_levels_of_its_plan(
    trials: list[FrozenTrial], study: StudyRecord, searched_folder: Path
) -> None:
    with Store(str(searched_folder / "autofit.db"), create=False) as store:
        ours = store.trials(study, state=State.FINISHED, purpose=Purpose.SEARCH)
    assert [trial.user_attrs["autofit_trial"] for trial in trials] == [each.id for each in ours]
    for trial, each in zip(trials, ours, strict=True):
        assert trial.params == each.plan.searched.levels


@pytest.fixture(scope="module")
def dashboard(storage: optuna.storages.RDBStorage) -> Iterator[Ask]:
    """Return what asks a running dashboard's JSON interface."""
    served = pytest.importorskip("optuna_dashboard").wsgi(storage)

    class Silent(WSGIRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Write nothing."""

    with make_server("127.0.0.1", 0, served, handler_class=Silent) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def ask(path: str) -> Any:
            url = f"http://127.0.0.1:{server.server_port}/api/{path}"
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)

        yield ask
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def shown(dashboard: Ask) -> dict[str, Any]:
    """What the dashboard's page of the study shows."""
    (listed,) = dashboard("studies")["study_summaries"]
    found: dict[str, Any] = dashboard(f"studies/{listed['study_id']}?after=0")
    assert found["name"] == listed["study_name"]
    return found


def test_the_dashboard_shows_what_optuna_has(
    shown: dict[str, Any], trials: list[FrozenTrial], study: StudyRecord
) -> None:
    assert study.id in shown["name"]
    assert shown["directions"] == ["minimize"]
    assert shown["objective_names"] == ["seconds a sample"]
    best = min(ended(trials, TrialState.COMPLETE), key=lambda trial: trial.value or 0.0)
    assert [trial["number"] for trial in shown["best_trials"]] == [best.number]
    for trial, row in zip(trials, shown["trials"], strict=True):
        assert row["state"] == trial.state.name.capitalize()
        params = {each["name"]: each["param_external_value"] for each in row["params"]}
        assert params == trial.params
        if trial.state is TrialState.COMPLETE:
            assert row["values"] == trial.values
        attributes = {each["key"]: each["value"] for each in row["user_attrs"]}
        assert attributes.get("description") == trial.user_attrs.get("description")


OLD_FORM = "optuna-dashboard 0.21 reads constraints in the form that Optuna had before 5.0"


@pytest.mark.xfail(reason=OLD_FORM, strict=True)
def test_the_dashboard_shows_constraints(shown: dict[str, Any], trials: list[FrozenTrial]) -> None:
    for trial, row in zip(trials, shown["trials"], strict=True):
        assert {*row["constraints"]} == {*trial.constraints.values()}
