"""How well a median is known, and which of two samples is larger. Imports no torch.

Step times are neither normal nor free of outliers, so both are answered from ranks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import comb

DOUBT = 0.05
"""The interval of ``median_interval`` misses the median with this probability."""


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median of at least one value.

    Its ends are two of the values, chosen by the binomial distribution, whatever the distribution
    of the values (Le Boudec, *Performance Evaluation of Computer and Communication Systems*, 2010,
    theorem 2.1; Hoefler & Belli, SC 2015, recommend it for run times). Five values or fewer reach
    less than 95 %. The interval is then their range: 94 % for five, 75 % for three.

    >>> median_interval([3.0, 1.0, 2.0])
    (1.0, 3.0)
    """
    ordered, count = sorted(values), len(values)
    below = accumulate(comb(count, rank) / 2**count for rank in range(count))
    left_out = sum(2 * share <= DOUBT for share in below)  # values outside, at each end
    first = max(0, left_out - 1)
    return ordered[first], ordered[-1 - first]


def spread(values: Sequence[float]) -> float:
    """Return how far the median may be off, as a share: 0.1 means 10 % up or down.

    This is half the width of ``median_interval``, relative to its middle. It is the same for times
    and for speeds, and less than one.
    """
    low, high = median_interval(values)
    return (high - low) / (high + low)


def larger(values: Sequence[float], than: Sequence[float]) -> float:
    """Return the probability that ``values`` lie above ``than`` by chance alone.

    This is the one-sided p-value of the exact rank-sum test (Mann & Whitney, 1947). A small one
    says that ``values`` are larger. Equal values count as half a win each.

    >>> larger([1.1, 1.2, 1.3], than=[0.8, 0.9, 1.0])
    0.05
    """
    few, many = len(values), len(than)
    wins = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a in values for b in than)
    ways = _ways(few, many)
    return sum(ways[number] for number in range(int(wins), few * many + 1)) / comb(few + many, few)


def _ways(few: int, many: int) -> list[int]:
    """Return in how many orders of ``few + many`` values the few win 0, 1, ... comparisons.

    These are the coefficients of the Gaussian binomial coefficient: the product of
    ``(1 - q**(many + i)) / (1 - q**i)`` for ``i`` from 1 to ``few``.
    """
    ways = [1] + [0] * (few * many)
    for i in range(1, few + 1):
        for number in range(few * many, many + i - 1, -1):
            ways[number] -= ways[number - many - i]
        for number in range(i, few * many + 1):
            ways[number] += ways[number - i]
    return ways
