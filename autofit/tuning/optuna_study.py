"""The Optuna study that proposes plans and mirrors the finished trials.

The tables of autofit are authoritative. Optuna's tables are written after them and can be rebuilt
from them. If the process is killed between the two writes, ``OptunaStudy.catch_up`` tells Optuna
the missing trials.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from autofit import strategies
from autofit.plan import Plan
from autofit.storage import Store, StudyRecord, TrialRecord
from autofit.worker.records.trials import HORIZON, GoOn, RoundEnded, Verdict

if TYPE_CHECKING:
    import optuna

    from autofit.analysis.acquisition import Situation

OURS = "autofit_trial"
"""User attribute of an Optuna trial: the id of the trial that it mirrors."""
MEMORY = "memory"
"""Constraint: excess of the peak over the budget, as a share; above zero if it does not fit."""

CHOICES: dict[str, tuple[str, ...]] = {
    strategy.name: tuple(level.name for level in strategy.levels)
    for strategy in strategies.REGISTRY
}
"""Every level of every strategy, whether or not this search tries it."""
VERSION = f"{zlib.crc32(repr(CHOICES).encode()):08x}"
"""Checksum of the choices. Optuna refuses a parameter whose choices have changed."""


P = ParamSpec("P")
T = TypeVar("T")


def _explained(
    method: Callable[Concatenate[OptunaStudy, P], T],
) -> Callable[Concatenate[OptunaStudy, P], T]:
    """Make a method raise ``StorageError`` in place of Optuna's database errors."""

    @functools.wraps(method)
    def explained(self: OptunaStudy, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._store.explained():
            return method(self, *args, **kwargs)

    return explained


class OptunaStudy:
    """The Optuna study of a study. Its methods raise ``StorageError``."""

    def __init__(self, store: Store, study: StudyRecord, *, horizon: int = HORIZON) -> None:
        import optuna

        from autofit.tuning.pruner import RankSumPruner
        from autofit.tuning.sampler import CostSampler

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._store = store
        self._budget = study.budget
        self._horizon = horizon
        self._open_trials: dict[Plan, optuna.Trial] = {}
        self._pruner = RankSumPruner()
        with warnings.catch_warnings(), store.explained():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._sampler = CostSampler(CHOICES)
            with store.alone():
                storage = optuna.storages.RDBStorage(store.url)
            self._study = optuna.create_study(
                storage=storage,
                study_name=f"autofit-{study.id}-space{VERSION}",
                sampler=self._sampler,
                pruner=self._pruner,
                direction="maximize",
                load_if_exists=True,
            )

    @_explained
    def catch_up(self, trials: Iterable[TrialRecord]) -> None:
        """Tell Optuna the trials that a killed search did not tell, and end its open trials."""
        states = self._optuna.trial.TrialState
        told: dict[int, tuple[int, optuna.trial.TrialState]] = {}
        for mirrored in self._study.get_trials(deepcopy=False):
            if mirrored.state is states.RUNNING:
                self._study.tell(mirrored.number, state=states.FAIL)
            elif mirrored.state.is_finished() and OURS in mirrored.user_attrs:
                told[mirrored.user_attrs[OURS]] = mirrored.number, mirrored.state
        for trial in trials:
            if trial.report is None or trial.optuna_number is not None:
                continue
            number, state = told.get(trial.id, (-1, None))
            if state is self._outcome(trial)[0]:
                self._store.set_optuna_number(trial, number)
            else:  # not told, or told with the state FAIL after an earlier kill
                self.tell(trial)

    @_explained
    def ask(self, situation: Situation) -> Plan | None:
        """Return the plan to measure next; ``None`` if no candidate is worth a trial."""
        chosen = self._sampler.choose(situation)
        if chosen is None:
            return None
        trial = self._study.ask()
        levels = {name: trial.suggest_categorical(name, each) for name, each in CHOICES.items()}
        self._open_trials[chosen.plan] = trial
        assert Plan.of(levels) == chosen.plan, "Optuna's trial has the levels of the plan"
        return chosen.plan

    @_explained
    def drop(self, plan: Plan) -> None:
        """End the Optuna trial of a plan whose trial ended without a verdict."""
        if (open_trial := self._open_trials.pop(plan, None)) is not None:
            self._study.tell(open_trial, state=self._optuna.trial.TrialState.FAIL)

    @_explained
    def end_round(self, plan: Plan, ended: RoundEnded) -> GoOn:
        """Report the steps of a round to the trial of ``plan``; return whether the trial goes on.

        A plan without an open trial is measured to the end: it is in its confirmation run.
        """
        trial = self._open_trials.get(plan)
        if trial is None:
            return GoOn(more=True)
        for batch, seconds in ended.steps:
            charged = seconds + ended.compile_seconds / self._horizon
            trial.report(charged / ended.effective_batch, batch)
        if trial.should_prune():
            return GoOn(more=False, pruned=True)
        known = self._study.get_trials(deepcopy=False)[trial.number]
        return GoOn(more=not self._pruner.is_clear(self._study, known))

    @_explained
    def tell(self, trial: TrialRecord) -> None:
        """Tell Optuna a finished trial, and store the number of the Optuna trial."""
        state, value, constraints = self._outcome(trial)
        open_trial = self._open_trials.pop(trial.plan, None)
        if open_trial is not None:
            open_trial.set_user_attr(OURS, trial.id)
            for name, excess in constraints.items():
                open_trial.set_constraint(name, excess)
            number = self._study.tell(open_trial, value, state).number
        else:
            self._study.add_trial(
                self._optuna.trial.create_trial(
                    state=state,
                    value=value,
                    params=trial.plan.searched.levels,
                    distributions={
                        name: self._optuna.distributions.CategoricalDistribution(choices)
                        for name, choices in CHOICES.items()
                    },
                    user_attrs={OURS: trial.id},
                    constraints=constraints or None,
                )
            )
            number = self._study.get_trials(deepcopy=False)[-1].number
        self._store.set_optuna_number(trial, number)

    def _outcome(
        self, trial: TrialRecord
    ) -> tuple[optuna.trial.TrialState, float | None, dict[str, float]]:
        """Return the Optuna state, the samples per second and the constraints of a finished trial.

        A trial that ran out of memory is ``PRUNED``: its constraint stays known to Optuna.
        """
        states = self._optuna.trial.TrialState
        measurement = trial.measurement
        if trial.verdict is Verdict.MEASURED and measurement is not None:
            excess = measurement.peak_device / self._budget - 1.0
            return states.COMPLETE, measurement.charged(self._horizon), {MEMORY: excess}
        if trial.verdict is Verdict.OUT_OF_MEMORY:
            shortage = trial.report.out_of_memory if trial.report else None
            requested = (shortage.requested if shortage else None) or self._budget
            return states.PRUNED, None, {MEMORY: max(requested / self._budget, 1e-3)}
        return states.FAIL, None, {}
