"""A split batch draws other dropout masks than the whole: those of a loop that is cut by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import fmean, stdev

import pytest

from tests.scripts._runner import TOLERANCE, Asked, Runs, assert_same_state, assert_same_text

SPLIT = {"micro_batch": "4"}
SEEDS = range(10)
LENGTH = ("--steps", "80")
LOSS = re.compile(r"step \d+ loss (\S+)")


@pytest.mark.full
def test_the_draws_are_those_of_a_loop_cut_by_hand(runs: Runs) -> None:
    by_hand, split = Asked(script="dropout_by_hand.py"), Asked(script="dropout.py").under(SPLIT)
    runs.ahead([by_hand, split])
    expected, found = runs.of(by_hand), runs.of(split)
    assert (expected.code, found.code) == (0, 0), expected.errors + found.errors
    assert_same_text(found.output, expected.output, TOLERANCE)
    assert_same_state(found.state, expected.state, TOLERANCE)


@pytest.mark.full
def test_the_masks_are_not_those_of_the_whole(runs: Runs) -> None:
    whole, split = Asked(script="dropout.py"), Asked(script="dropout.py").under(SPLIT)
    runs.ahead([whole, split])
    assert runs.of(whole).output != runs.of(split).output


def late_loss(runs: Runs, asked: Asked) -> float:
    """The mean of the losses printed in the second half."""
    done = runs.of(asked)
    assert done.code == 0, done.errors
    losses = [float(loss) for loss in LOSS.findall(done.output)]
    assert len(losses) == 16
    return fmean(losses[8:])


def surprise(differences: Sequence[float]) -> float:
    """The mean of paired differences, in its own standard errors."""
    return abs(fmean(differences)) / (stdev(differences) / math.sqrt(len(differences)))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_loss_curves_are_statistically_alike(runs: Runs) -> None:
    """Over seeds the split run's losses are the whole's; another rate of dropout is told apart."""
    whole = [Asked(script="dropout.py", arguments=(*LENGTH, "--seed", str(s))) for s in SEEDS]
    split = [each.under(SPLIT) for each in whole]
    other = [
        Asked(script="dropout.py", arguments=(*each.arguments, "--rate", "0")) for each in whole
    ]
    runs.ahead([*whole, *split, *other])
    expected = [late_loss(runs, each) for each in whole]
    found = [late_loss(runs, each) - e for each, e in zip(split, expected, strict=True)]
    apart = [late_loss(runs, each) - e for each, e in zip(other, expected, strict=True)]
    assert surprise(found) < 3
    assert surprise(apart) > 6
