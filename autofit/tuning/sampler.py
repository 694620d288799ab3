"""An Optuna sampler that suggests what the cost model finds most promising."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from autofit.analysis.acquisition import Prospect, Situation, choose


class CostSampler(TPESampler):
    """Suggests every level of the plan that was chosen last; without one, what TPE would.

    Choosing comes before asking, because there may be nothing worth a trial: a search ends there,
    and Optuna has no word for that.
    """

    def __init__(self, choices: Mapping[str, Sequence[str]]) -> None:
        """``choices``: of each parameter."""
        super().__init__(seed=0, constant_liar=True)
        self._space = {name: CategoricalDistribution(each) for name, each in choices.items()}
        self._waiting: dict[str, str] | None = None
        """Levels of the plan that the next trial gets."""

    def choose(self, situation: Situation) -> Prospect | None:
        """Choose the plan of the next trial; ``None`` when none is worth one."""
        chosen = choose(situation)
        self._waiting = chosen.plan.levels if chosen else None
        return chosen

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """All parameters at once, where a plan was chosen."""
        if self._waiting is None:
            return super().infer_relative_search_space(study, trial)
        return {**self._space}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Give away the plan that was chosen, once."""
        if self._waiting is None:
            return super().sample_relative(study, trial, search_space)
        chosen, self._waiting = self._waiting, None
        return {**chosen}
