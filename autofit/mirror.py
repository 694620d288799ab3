"""The study as Optuna sees it: asked for proposals, told what became of them.

Our tables are the truth. Optuna's are written after our commit and can be made again from ours, so
a kill between the two loses nothing: ``Mirror.catch_up`` tells what was not told.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from autofit import strategies
from autofit.plan import Plan
from autofit.storage import Store, StudyRecord, TrialRecord
from autofit.strategies import AS_IS
from autofit.strategies.micro_batch import AUTO
from autofit.worker.records import Verdict

if TYPE_CHECKING:
    import optuna

VERSION = 2
"""Of the search space: Optuna refuses a parameter whose choices have changed."""
PATIENCE = 20
"""Proposals in a row that are known already, after which Optuna has nothing new to say."""
OURS = "autofit_trial"
"""User attribute of Optuna's trial: the row of ours that it mirrors."""
MEMORY = "memory"
"""The constraint: by what part of the budget a plan is too large; above zero where it is."""

CHOICES: dict[str, tuple[str, ...]] = {
    strategy.name: tuple(level.name for level in strategy.levels)
    for strategy in strategies.REGISTRY
}
"""Every level of every strategy, whatever may be tried now: Optuna's space never changes."""


class Mirror:
    """Optuna's study of one of ours."""

    def __init__(self, store: Store, study: StudyRecord, *, seed: int = 0) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._store = store
        self._budget = study.budget
        self._asked: dict[Plan, optuna.Trial] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study = optuna.create_study(
                storage=optuna.storages.RDBStorage(store.url),
                study_name=f"autofit-{study.id}-space{VERSION}",
                sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
                direction="maximize",
                load_if_exists=True,
            )

    def catch_up(self, trials: Iterable[TrialRecord]) -> None:
        """Tell what a killed search could not; end what it asked and never finished."""
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
            else:  # not told, or given up half-told by a search that was killed as well
                self.tell(trial)

    def enqueue(self, plans: Iterable[Plan]) -> None:
        """Put plans at the head of what is proposed, in this order."""
        for plan in plans:
            self._study.enqueue_trial(_parameters(plan), skip_if_exists=True)

    def ask(self, candidates: Sequence[Plan]) -> Plan | None:
        """Return a proposal among ``candidates``; ``None`` when there are none."""
        if not candidates:
            return None
        for _ in range(PATIENCE):
            trial = self._study.ask()
            levels = {name: trial.suggest_categorical(name, each) for name, each in CHOICES.items()}
            plan = Plan.of(levels)
            if plan in candidates:
                self._asked[plan] = trial
                return plan
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return candidates[0]

    def tell(self, trial: TrialRecord) -> None:
        """Tell a trial that has just been stored as finished."""
        state, value, constraints = self._outcome(trial)
        asked = self._asked.pop(trial.plan, None)
        if asked is not None:
            asked.set_user_attr(OURS, trial.id)
            for name, excess in constraints.items():
                asked.set_constraint(name, excess)
            number = self._study.tell(asked, value, state).number
        else:
            self._study.add_trial(
                self._optuna.trial.create_trial(
                    state=state,
                    value=value,
                    params=_parameters(trial.plan),
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
        """Return the state, the samples per second and the constraints of a finished trial.

        Out of memory is pruned, never failed: a failed trial would be proposed again.
        """
        states = self._optuna.trial.TrialState
        measurement = trial.measurement
        if trial.verdict is Verdict.MEASURED and measurement is not None:
            excess = measurement.peak_device / self._budget - 1.0
            return states.COMPLETE, measurement.samples_per_second, {MEMORY: excess}
        if trial.verdict is Verdict.OUT_OF_MEMORY:
            shortage = trial.report.out_of_memory if trial.report else None
            requested = (shortage.requested if shortage else None) or self._budget
            return states.PRUNED, None, {MEMORY: max(requested / self._budget, 1e-3)}
        return states.FAIL, None, {}


def _parameters(plan: Plan) -> dict[str, str]:
    """Return the plan as a point of Optuna's space, where a size is ``auto``."""
    sized = plan["micro_batch"] not in (AS_IS, AUTO)
    return plan.levels | ({"micro_batch": AUTO} if sized else {})
