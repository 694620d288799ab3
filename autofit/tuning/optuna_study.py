"""What Optuna gets: a study in memory, made from the state of a search; and a copy of each trial.

autofit's tables are the record of a search. Optuna's samplers get a study that is made from them.
Its own tables are written for programs such as ``optuna-dashboard``, and nothing is learnt there.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from autofit.analysis.candidates import SearchSnapshot
from autofit.exceptions import UsageError
from autofit.plan import Plan
from autofit.storage import Purpose, State, Store, StudyRecord, TrialRecord
from autofit.strategies import AS_IS, REGISTRY
from autofit.units import format_size
from autofit.worker.records.trials import Verdict

MEMORY = "memory"
"""Constraint: excess of the peak over the budget, as a share; above zero if it does not fit."""
Choices = Mapping[str, CategoricalDistribution]
"""The levels of strategies, as the parameters of an Optuna study."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


def study_of(state: SearchSnapshot, sampler: BaseSampler) -> optuna.Study:
    """Return a study in memory that holds the trials of a search, running ones included.

    It is made anew for each question to a sampler: Optuna forbids that the choices of a parameter
    change, and a finished trial may get other figures by real steps or by its confirmation run.
    """
    study, choices = optuna.create_study(sampler=sampler), choices_of(state)
    for trial in state.finished:
        known = outcome(trial, state.budget, state.horizon)
        study.add_trial(_frozen(trial.plan, choices, **known))
    for plan in state.running:
        study.add_trial(_frozen(plan, choices, state=TrialState.RUNNING))
    return study


def choices_of(state: SearchSnapshot) -> Choices:
    """Return the parameters: the levels that may be tried now, and those that were tried."""
    found = {name: dict.fromkeys(levels) for name, levels in state.space.levels}
    return _choices(found, (*(trial.plan for trial in state.finished), *state.running))


def _choices(found: dict[str, dict[str, None]], plans: Iterable[Plan]) -> Choices:
    for plan in plans:
        for name, level in plan.searched.changes:
            found.setdefault(name, {AS_IS: None})[level] = None
    return {n: CategoricalDistribution([*each]) for n, each in found.items() if len(each) > 1}


def outcome(trial: TrialRecord, budget: int, horizon: int) -> dict[str, Any]:
    """Return the Optuna state, the seconds a sample and the constraints of a finished trial.

    A trial that ran out of memory is ``PRUNED``: its constraint stays known to Optuna.
    """
    measured = trial.measurement
    if trial.verdict is Verdict.MEASURED and measured is not None:
        excess = {MEMORY: measured.peak_device / budget - 1.0}
        seconds = 1.0 / measured.charged(horizon)
        return {"state": TrialState.COMPLETE, "value": seconds, "constraints": excess}
    if trial.verdict is Verdict.OUT_OF_MEMORY:
        shortage = trial.report.out_of_memory if trial.report else None
        requested = (shortage.requested if shortage else None) or budget
        excess = {MEMORY: max(requested / budget, 1e-3)}
        return {"state": TrialState.PRUNED, "constraints": excess}
    return {"state": TrialState.FAIL}


def _frozen(plan: Plan, choices: Choices, **about: Any) -> FrozenTrial:
    levels = plan.searched.levels
    params = {name: levels[name] for name in choices}
    return create_trial(params=params, distributions=dict(choices), **about)


class Dashboard:
    """A copy of a study's finished trials in Optuna's tables, which stand in the same database.

    Its methods raise ``StorageError``.
    """

    def __init__(self, store: Store, study: StudyRecord, *, horizon: int) -> None:
        """Add what the copy lacks: a search that was killed may have left a trial out."""
        self._store, self._record, self._horizon = store, study, horizon
        self._write()

    def tell(self, trial: TrialRecord) -> None:
        """Write a trial that has just finished."""
        levels = trial.plan.searched.changes
        with contextlib.suppress(KeyError):  # somebody has deleted the copy
            if all(level in self._choices[name].choices for name, level in levels):
                with self._store.explained():
                    self._study.add_trial(self._frozen(trial))
                return
        self._write()  # Optuna forbids that the choices of a parameter change

    def _write(self) -> None:
        """Add the trials that the copy lacks; make it anew if it has others."""
        study = self._record
        trials = self._store.trials(study, state=State.FINISHED, purpose=Purpose.SEARCH)
        found = {each.name: dict.fromkeys(n.name for n in each.levels) for each in REGISTRY}
        self._choices = _choices(found, (trial.plan for trial in trials))
        wanted, storage = [self._frozen(trial) for trial in trials], _tables(self._store)
        self._study = self._study_in(storage)
        with self._store.explained():
            copied = self._study.get_trials()
        if [*map(_content, copied)] != [*map(_content, wanted[: len(copied)])]:
            _delete_copy(self._store, study)
            self._study, copied = self._study_in(storage), []
        with self._store.explained():
            self._study.add_trials(wanted[len(copied) :])

    def _study_in(self, storage: optuna.storages.RDBStorage) -> optuna.Study:
        """Return the Optuna study, which may be a new one."""
        study = self._record
        with self._store.explained(), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            found = optuna.create_study(
                storage=storage, study_name=name_of(study), load_if_exists=True
            )
            found.set_user_attr("budget_bytes", study.budget)
            found.set_user_attr("script", str(study.script))
            found.set_user_attr("hardware", study.hardware.name)
            found.set_metric_names(["seconds a sample"])
        return found

    def _frozen(self, trial: TrialRecord) -> FrozenTrial:
        known = outcome(trial, self._record.budget, self._horizon)
        return _frozen(trial.plan, self._choices, **known, user_attrs=_attributes(trial))


def _content(trial: FrozenTrial) -> tuple[object, ...]:
    """Return what is copied of a trial."""
    return trial.state, trial.values, trial.distributions, trial.params, trial.user_attrs


def delete_study(store: Store, study: StudyRecord) -> None:
    """Delete a study from the store, and its copy from Optuna's tables.

    Raises ``UsageError`` if another process searches it.
    """
    if (other := store.holder(study)) is not None:
        raise UsageError(
            f"process {other.pid} on {other.host} searches study {study.id}: stop it first"
        )
    _delete_copy(store, study)  # first: a search writes it again from autofit's tables
    store.delete_study(study)


def _delete_copy(store: Store, study: StudyRecord) -> None:
    """Delete the copy of a study, if there is one."""
    with store.explained(), contextlib.suppress(KeyError):  # no search has begun, or was killed
        optuna.delete_study(study_name=name_of(study), storage=_tables(store))


def _tables(store: Store) -> optuna.storages.RDBStorage:
    """Return Optuna's storage, which makes its tables if they are missing."""
    with store.explained(), store.alone():
        return optuna.storages.RDBStorage(store.url)


def name_of(study: StudyRecord) -> str:
    """Return the name of the Optuna study: script, budget and the study's identifier."""
    memory = study.key.memory
    budget = format_size(memory) if memory is not None else "whole device"
    return f"{study.script.target}, {budget} ({study.id})"


def _attributes(trial: TrialRecord) -> dict[str, Any]:
    """Return the user attributes of a trial: what a person looks for."""
    report, measured = trial.report, trial.measurement
    assert report is not None, "a finished trial has a report"
    found: dict[str, Any] = {
        "autofit_trial": trial.id,
        "verdict": str(report.verdict),
        "description": str(report.best or report.plan),
        "launch": trial.launch,
        "versions": dict(trial.versions),
        "seconds": phases(trial),
    }
    if report.reason:
        found["reason"] = report.reason
    if report.blamed:
        found["blamed"] = report.blamed
    if measured is not None:
        found |= {
            "samples_per_second": measured.samples_per_second,
            "peak_device_bytes": measured.peak_device,
            "peak_reserved_bytes": measured.peak_reserved,
            "peak_allocated_bytes": measured.peak_allocated,
        }
    return found


def phases(trial: TrialRecord) -> Mapping[str, float]:
    """Return the seconds of a finished trial by phase: start-up, compilation, steps, and others.

    The check of the plan is the largest part of the others.
    """
    report = trial.report
    if report is None or trial.ended is None:
        return {}
    total = (trial.ended - trial.created).total_seconds()
    found = {
        "startup": report.startup_seconds,
        "compile": sum(each.compile_seconds for each in report.measurements),
        "steps": sum(sum(each.step_seconds) for each in report.measurements),
    }
    return {**found, "others": max(0.0, total - sum(found.values()))}
