"""The pruner, in real Optuna studies, and the answers to a trial that asks whether to go on."""

from __future__ import annotations

import random
from collections.abc import Sequence

import optuna
import pytest
from optuna.trial import TrialState, create_trial

from autofit.tuning.pruner import RankSumPruner
from autofit.worker.records.trials import WINDOW

pytestmark = pytest.mark.quick

FAST = [0.100, 0.101, 0.102, 0.101, 0.100]


@pytest.fixture
def study() -> optuna.Study:
    """A study whose best trial takes 0.1 s a sample."""
    study = optuna.create_study(pruner=RankSumPruner())
    add(study, FAST)
    return study


def add(study: optuna.Study, steps: Sequence[float], excess: float = -0.5) -> None:
    """Add a complete trial, which fits if ``excess`` is not above zero."""
    study.add_trial(
        create_trial(
            state=TrialState.COMPLETE,
            value=sorted(steps)[len(steps) // 2],
            intermediate_values=dict(enumerate(steps, start=1)),
            constraints={"memory": excess},
        )
    )


def pruned(study: optuna.Study, steps: Sequence[float], first: int = 1) -> bool:
    trial = study.ask()
    for batch, seconds in enumerate(steps, start=first):
        trial.report(seconds, batch)
    return trial.should_prune()


def test_five_slower_steps_are_enough(study: optuna.Study) -> None:
    slow = [each * 1.1 for each in FAST]
    assert pruned(study, slow)
    assert not pruned(study, slow[:4])


def test_a_difference_as_between_two_launches_of_one_plan_is_none(study: optuna.Study) -> None:
    assert not pruned(study, [each * 1.025 for each in FAST])


def test_noise_is_not_taken_for_a_difference(study: optuna.Study) -> None:
    """Of 200 trials that are as fast as the best, on a machine whose steps vary by a quarter."""
    rng = random.Random(0)
    noisy = [[0.1 * rng.lognormvariate(0.0, 0.25) for _ in range(10)] for _ in range(201)]
    study = optuna.create_study(pruner=RankSumPruner())
    add(study, noisy[0])
    assert sum(pruned(study, steps) for steps in noisy[1:]) <= 6


def test_only_a_trial_that_fits_counts_as_the_best(study: optuna.Study) -> None:
    add(study, [each / 2 for each in FAST], excess=0.1)
    assert not pruned(study, FAST)
    add(study, [each / 2 for each in FAST])
    assert pruned(study, FAST)


def test_only_the_last_window_is_compared(study: optuna.Study) -> None:
    """The first was at another size."""
    trial = study.ask()
    for batch, seconds in enumerate(FAST, start=1):
        trial.report(seconds * 2, batch)
        trial.report(seconds, WINDOW + batch)
    assert not trial.should_prune()


def test_a_size_search_ends_if_no_size_can_be_faster_than_the_best(study: optuna.Study) -> None:
    pruner = RankSumPruner()
    assert pruner.cannot_win(study, 0.105)
    assert not pruner.cannot_win(study, 0.102)
    assert not pruner.cannot_win(optuna.create_study(), 0.105)


def test_nothing_is_pruned_before_there_is_a_best() -> None:
    study = optuna.create_study(pruner=RankSumPruner())
    assert not pruned(study, FAST)
    study.add_trial(create_trial(state=TrialState.COMPLETE, value=0.01))  # without steps
    assert not pruned(study, FAST)
