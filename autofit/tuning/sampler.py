"""An Optuna sampler that suggests the plan with the largest expected gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from autofit.analysis.acquisition import Prospect, Situation, choose


class CostSampler(TPESampler):
    """Suggests the levels of the plan that ``choose`` returned; without one, samples like TPE.

    Call ``choose`` before ``study.ask``. A search ends when no plan is worth a trial, and a sampler
    cannot tell Optuna so.
    """

    def __init__(self, choices: Mapping[str, Sequence[str]]) -> None:
        """Create a sampler; ``choices`` maps each parameter to its values."""
        super().__init__(seed=0, constant_liar=True)
        self._space = {name: CategoricalDistribution(each) for name, each in choices.items()}
        self._next_levels: dict[str, str] | None = None
        """Levels of the next trial's plan."""

    def choose(self, situation: Situation) -> Prospect | None:
        """Choose the plan of the next trial; ``None`` if no plan is worth a trial."""
        chosen = choose(situation)
        self._next_levels = chosen.plan.levels if chosen else None
        return chosen

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return all parameters if a plan was chosen."""
        if self._next_levels is None:
            return super().infer_relative_search_space(study, trial)
        return {**self._space}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the levels of the chosen plan, and forget them."""
        if self._next_levels is None:
            return super().sample_relative(study, trial, search_space)
        chosen, self._next_levels = self._next_levels, None
        return {**chosen}
