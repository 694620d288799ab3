"""kill -9 of one process of a search: nothing is lost, no technique is banned, nothing is left.

Two of them here, each of the six in the full tests; ``make faults`` kills a hundred times.
"""

from __future__ import annotations

import random

import pytest

from tests.faults.killing import TARGETS, Kill, Undisturbed, kill, undisturbed


@pytest.fixture(scope="module")
def plain() -> Undisturbed:
    """What the search comes to when nobody disturbs it."""
    return undisturbed()


def killed(target: str, plain: Undisturbed, seed: int) -> Kill:
    """Kill until the process was there when its time had come."""
    chance = random.Random(seed)
    return next(made for _ in range(9) if (made := kill(target, chance, plain)).killed)


@pytest.mark.quick
@pytest.mark.full
@pytest.mark.parametrize("target", ["trial", "slot"])
def test_a_search_carries_on(target: str, plain: Undisturbed) -> None:
    made = killed(target, plain, 0)
    assert made.faults == (), made.printed


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", TARGETS)
def test_a_search_carries_on_twice(target: str, plain: Undisturbed) -> None:
    for seed in (1, 2):
        made = killed(target, plain, seed)
        assert made.faults == (), made.printed
