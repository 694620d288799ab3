"""An Optuna pruner that ends a trial as soon as its steps are clearly slower than the best's.

Intermediate values are seconds a sample, with the time to compile, and smaller is better. The steps
of a trial are batches of one or more windows, numbered as ``RoundEnded`` says.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from optuna.pruners import BasePruner
from optuna.study import Study
from optuna.trial import FrozenTrial

from autofit.analysis.verdicts import TIE
from autofit.worker.records.medians import larger
from autofit.worker.records.trials import STEPS, WINDOW

CHANCE = 0.01
"""A difference counts if it would arise by chance with at most this probability.

Five steps against five can show that: the probability that all are slower by chance is 0.4 %.
"""


class RankSumPruner(BasePruner):
    """Prunes a trial that is slower than the best trial by more than ``TIE``, by a rank-sum test.

    Optuna's ``WilcoxonPruner`` needs SciPy, and pairs of steps: five pairs reach a probability of
    3 % at best. ``TIE`` is deducted first, because two launches of one plan differ by as much, and
    the steps of one launch do not show it. A trial is never pruned before ``STEPS`` steps.
    """

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Return whether ``trial`` is clearly slower than the best trial that fits."""
        best, steps = _best(study), last_window(trial.intermediate_values)
        return best is not None and clearly_slower(steps, than=best)

    def cannot_win(self, study: Study, least: float) -> bool:
        """Return whether ``least`` seconds a sample are slower than the best trial that fits."""
        best = _best(study)
        return best is not None and least > statistics.median(best) * (1 + TIE)

    def is_clear(self, study: Study, trial: FrozenTrial) -> bool:
        """Return whether ``trial`` is clearly slower or faster than the best trial that fits."""
        best, steps = _best(study), last_window(trial.intermediate_values)
        if best is None:
            return False
        return clearly_slower(steps, than=best) or clearly_slower(best, than=steps)


def clearly_slower(steps: Sequence[float], *, than: Sequence[float]) -> bool:
    """Return whether ``steps`` take longer than others by more than ``TIE``, beyond chance."""
    if min(len(steps), len(than)) < STEPS:
        return False
    return larger([each / (1 + TIE) for each in steps], than) <= CHANCE


def _best(study: Study) -> list[float] | None:
    """Return the steps of the best trial's fastest window; ``None`` without such a trial."""
    try:
        best = study.best_trial
    except ValueError:  # no trial is complete, or none fits
        return None
    return min(_windows(best.intermediate_values), key=statistics.median, default=None)


def last_window(values: Mapping[int, float]) -> list[float]:
    """Return the intermediate values of the last window."""
    return next(reversed(_windows(values)), [])


def _windows(values: Mapping[int, float]) -> list[list[float]]:
    """Return the intermediate values of each window, in order."""
    windows: dict[int, list[float]] = {}
    for step in sorted(values):
        windows.setdefault(step // WINDOW, []).append(values[step])
    return list(windows.values())
