"""Intervals of medians and rank sums, checked against tables and against simulated samples."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from autofit.worker.records.medians import larger, median_interval, spread

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("count", "interval"), [(1, (1, 1)), (5, (1, 5)), (8, (1, 8)), (9, (2, 8)), (20, (6, 15))]
)
def test_the_ranks_are_those_of_the_table(count: int, interval: tuple[int, int]) -> None:
    """Le Boudec 2010, table A.1."""
    assert median_interval([float(each) for each in range(count, 0, -1)]) == interval


@pytest.mark.parametrize("count", [9, 20])
def test_the_interval_holds_the_median(count: int) -> None:
    """Of a skewed distribution, as step times have; its median is known."""
    rng = random.Random(0)
    inside = 0
    for _ in range(2000):
        low, high = median_interval([rng.lognormvariate(0.0, 0.5) for _ in range(count)])
        inside += low <= 1.0 <= high
    assert inside / 2000 > 0.94


def test_one_slow_step_in_ten_widens_nothing() -> None:
    steps = [0.57, 0.58, 0.57, 0.59, 0.58, 0.57, 0.58, 0.59, 0.58]
    assert spread([*steps, 10.84]) == pytest.approx(spread([*steps, 0.58]), abs=0.01)
    assert spread([10.84, 0.57]) > 0.8
    assert statistics.median([10.84, 0.57, 0.58]) == 0.58


def test_a_spread_is_the_same_for_times_and_speeds() -> None:
    times = [0.4, 0.5, 0.7, 0.6, 0.5]
    assert spread(times) == pytest.approx(spread([1 / each for each in times]))
    assert spread([2.0] * 5) == 0


def test_the_rank_sum_is_exact() -> None:
    """Counted over all ways in which 3 of 7 ranks can be the first sample's."""
    ranks = range(7)
    first = (2, 5, 6)
    rest = [each for each in ranks if each not in first]
    ways = list(itertools.combinations(ranks, 3))
    extreme = sum(sum(way) >= sum(first) for way in ways)
    assert larger(first, rest) == pytest.approx(extreme / len(ways))
    assert larger([6, 7, 8, 9, 10], [1, 2, 3, 4, 5]) == pytest.approx(1 / 252)
