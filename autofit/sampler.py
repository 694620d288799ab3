"""An Optuna sampler that suggests what the cost model finds most promising."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autofit.choice import Prospect, Situation, choose


class CostSampler(BaseSampler):
    """Suggests every level of the plan that was chosen last; without one, what ``rival`` would.

    Choosing comes before asking, because there may be nothing worth a trial: a search ends there,
    and Optuna has no word for that.
    """

    def __init__(self, choices: Mapping[str, Sequence[str]], rival: BaseSampler) -> None:
        """``choices``: of each parameter. ``rival``: samples for whoever asks without choosing."""
        self._space = {name: CategoricalDistribution(each) for name, each in choices.items()}
        self._rival = rival
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
            return self._rival.infer_relative_search_space(study, trial)
        return {**self._space}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Give away the plan that was chosen, once."""
        if self._waiting is None:
            return self._rival.sample_relative(study, trial, search_space)
        chosen, self._waiting = self._waiting, None
        return {**chosen}

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Leave it to the rival: a plan that was chosen has all its parameters."""
        return self._rival.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Pass on."""
        self._rival.before_trial(study, trial)

    def after_trial(
        self,
        study: Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Pass on: the rival keeps constraints there."""
        self._rival.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        """Pass on."""
        self._rival.reseed_rng()
