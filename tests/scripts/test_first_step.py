"""Under no level does a real run call, draw or keep more than the script: counted in step one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from autofit.strategies import AUTO, REGISTRY
from tests.scripts._runner import Asked, Runs

PARTS = 2
ROUNDING = 1e-6
"""Largest relative difference of a number that compiled code may make."""
SPLIT, SOME = ("micro_batch", "4"), ("checkpointing", "3")
NUMBERS = dict((SPLIT, SOME))
ALL = [
    (strategy.name, NUMBERS[strategy.name] if level.name == AUTO else level.name)
    for strategy in REGISTRY
    for level in strategy.levels[1:]
]
CALLED_AGAIN = {
    # Only the last part's graph is kept where the loss is not the model's: the others run again.
    SPLIT: {"model": 2 * PARTS - 1, "hook": 2 * PARTS - 1, "hook of a block": 2 * PARTS - 1}
    | {"block": 4 * (2 * PARTS - 1)},
    # Blocks of the four that are recomputed in backward.
    SOME: {"block": 4 + 3},
    ("checkpointing", "all"): {"block": 4 + 4},
}
STATEFUL = [*CALLED_AGAIN, ("activation_offload", "all"), ("compile", "full")]


def counted(level: tuple[str, str] | None, *arguments: str) -> Asked:
    environment = (("PYTHONHASHSEED", "0"),)
    asked = Asked(script="counted.py", arguments=arguments, environment=environment)
    return asked if level is None else asked.under(dict([level]))


def first_step(runs: Runs, asked: Asked) -> dict[str, Any]:
    done = runs.of(asked)
    assert done.code == 0, done.errors
    found: dict[str, Any] = json.loads(done.output)
    return found


@pytest.mark.parametrize(
    "level",
    [
        pytest.param(each, marks=pytest.mark.quick if each == SPLIT else pytest.mark.full)
        for each in ALL
    ],
)
def test_calls_and_draws(runs: Runs, level: tuple[str, str]) -> None:
    """A level that is refused leaves everything as it is: no more is called then either."""
    runs.ahead([counted(None), counted(level)])
    expected, found = first_step(runs, counted(None)), first_step(runs, counted(level))
    assert found["draws"] == expected["draws"]
    assert found["calls"] == expected["calls"] | CALLED_AGAIN.get(level, {})


@pytest.mark.full
@pytest.mark.parametrize("level", STATEFUL)
def test_state_of_ten_kinds(runs: Runs, level: tuple[str, str]) -> None:
    """What ``state_dict`` does not know is as it would be, and so is every draw."""
    runs.ahead([counted(None, "--stateful"), counted(level, "--stateful")])
    expected = first_step(runs, counted(None, "--stateful"))
    found = first_step(runs, counted(level, "--stateful"))
    assert len(expected["state"]) > 10
    torch.testing.assert_close(found["state"], expected["state"], rtol=ROUNDING, atol=0)
    assert found["draws"] == expected["draws"]
