"""Under the plan as is a run is the plain script's bit by bit, and is rescued all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autofit.worker import meter
from autofit.worker.meter import build

pytestmark = pytest.mark.skipif(
    build.shim() is None, reason="the shim needs Linux and a C compiler"
)

FP64 = 1e-12
RESCUED = [
    "loss_outside:forward",
    "loss_outside:backward",
    "loss_inside:backward",
    "cache_beside:backward",
    "accumulation:backward",
    "checkpointed:backward",
    "dropout:forward",
    "dropout:backward",
    "in_place_on_the_output:backward",
]
RESCUED_TOO = [
    "loss_inside:forward",
    "accumulation:forward",
    "two_roots:forward",
]
REFUSED = {
    "both_outputs:backward": "another one computed from it",
    "weight_penalty:backward": "uses parameters directly",
    "graph_kept:backward": "keeps a graph for another backward",
    "arguments_need_gradients:backward": "arguments need gradients",
    "cache_before:backward": "comes after a cache",
}
ON_HOST = {
    "batch_norm:forward": "changes its buffer norm.running_mean",
    "batch_norm:backward": "changes its buffer norm.running_mean",
    "gradients_by_hand:forward": "torch.autograd.grad",
}
PLAIN = ["gradient_penalty:backward", "gradients_by_hand:backward", "draws_everywhere:forward"]
TIERS = {"quick": (*RESCUED, *REFUSED, *ON_HOST, *PLAIN), "full": tuple(RESCUED_TOO)}

Result = Callable[[str], dict[str, Any]]


def quick_and_full(tier: list[str], rest: list[str]) -> list[Any]:
    return [
        *(pytest.param(name, marks=pytest.mark.quick) for name in tier),
        *(pytest.param(name, marks=pytest.mark.full) for name in rest),
    ]


def _launch(program: Path, scenarios: tuple[str, ...]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(program), *scenarios],
        env=os.environ
        | meter.environment("cpu", None)
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(program.parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def result(root: Path) -> Result:
    """What was found in a scenario; those of a tier run in one process, one after another."""
    program = root / "tests" / "harness" / "rescue" / "standby_scenarios.py"
    launched = cache(lambda tier: _launch(program, TIERS[tier]))

    def of(name: str) -> dict[str, Any]:
        tier = next(tier for tier, names in TIERS.items() if name in names)
        return launched(tier)[TIERS[tier].index(name)]

    return of


@pytest.mark.parametrize(
    "name", quick_and_full([*RESCUED, *REFUSED, *ON_HOST, *PLAIN], RESCUED_TOO)
)
def test_while_memory_lasts_nothing_is_changed(result: Result, name: str) -> None:
    line = result(name)
    assert line["plain"] == 0.0
    assert line["drawn"]
    assert not line["quiet"]


@pytest.mark.parametrize("name", quick_and_full(RESCUED, RESCUED_TOO))
def test_a_step_that_runs_out_is_completed(result: Result, name: str) -> None:
    line = result(name)
    assert line.get("rescued", line) <= FP64
    assert line["short"][0] == [name.split(":")[1], 1024]


@pytest.mark.quick
@pytest.mark.parametrize(("name", "reason"), ON_HOST.items())
def test_what_cannot_be_split_saves_its_tensors_on_the_host(
    result: Result, name: str, reason: str
) -> None:
    """Running statistics move once although the call runs twice."""
    line = result(name)
    assert line.get("rescued", line) <= FP64
    (phase, told), *_ = line["on_host"]
    assert phase == name.split(":")[1]
    assert reason in told


@pytest.mark.quick
@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_what_cannot_go_on_says_why(result: Result, name: str, reason: str) -> None:
    line = result(name)
    (note,) = line["notes"]
    assert reason in note
    assert "can't allocate memory" in line["error"]
