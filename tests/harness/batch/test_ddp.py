"""A batch split under DistributedDataParallel trains as the plain script does: two real ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autofit.worker import meter
from autofit.worker.meter import build

FP64 = 1e-12
QUICK = [
    "loss_outside",
    "loss_inside",
    "accumulation",
    "accumulation_loss_inside",
    "unused",
    "buffers",
    "adversaries",
    "checkpointed",
    "gradients_zeroed_in_place",
    "another_graph_on_one_rank",
]
REST = [
    "gradients_in_buckets",
    "comm_hook",
    "weight_penalty_outside",
    "accumulation_unused",
    "unused_loss_inside",
    "two_calls_one_backward",
    "checkpointed_whole",
    "uneven_inputs",
]
HUNGRY = ["hungry_forward", "hungry_backward"]
REFUSED = {
    "static_graph": "static_graph",
    "wrapped_inside": "inside the called model",
    "gathering": "communicates with other ranks",
}
REFUSED_SLOWLY = {
    "sharded": "not split under FSDP",
    "compiled_around": "inside the called model",
}
TIERS = {
    "quick": (*QUICK, *HUNGRY, *REFUSED),
    "full": (*REST, *REFUSED_SLOWLY),
}

Results = Callable[[str], list[dict[str, Any]]]


def _launch(program: Path, scenarios: tuple[str, ...]) -> list[list[dict[str, Any]]]:
    """Run the scenarios of a tier on two ranks; return the lines of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | meter.environment("cpu", None) | {"OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), *scenarios],
            env=common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors
    return [[json.loads(line) for line in lines.splitlines()] for lines, _ in outputs]


@pytest.fixture(scope="module")
def results(root: Path) -> Results:
    """What each rank found in a scenario; those of a tier run once, one after another."""
    program = root / "tests" / "harness" / "batch" / "ddp_ranks.py"
    launched = cache(lambda tier: _launch(program, TIERS[tier]))

    def of(name: str) -> list[dict[str, Any]]:
        tier = next(tier for tier, names in TIERS.items() if name in names)
        return [next(line for line in rank if line["name"] == name) for rank in launched(tier)]

    return of


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.quick) for name in QUICK]
    + [pytest.param(name, marks=pytest.mark.full) for name in REST],
)
def test_trains_as_the_plain_script(results: Results, name: str) -> None:
    for rank in results(name):
        assert rank.get("difference", rank) <= FP64
        assert rank["agree"]
        assert not rank["shortages"]


@pytest.mark.quick
@pytest.mark.skipif(build.shim() is None, reason="the shim needs Linux and a C compiler")
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_rank_is_rescued_alone(results: Results, phase: str) -> None:
    first, second = results(f"hungry_{phase}")
    assert not first["shortages"]
    assert second["shortages"] == [[phase, 12]]
    for rank in (first, second):
        assert rank["difference"] <= FP64
        assert rank["agree"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [pytest.param(*case, marks=pytest.mark.quick) for case in REFUSED.items()]
    + [pytest.param(*case, marks=pytest.mark.full) for case in REFUSED_SLOWLY.items()],
)
def test_what_cannot_be_split_is_refused(results: Results, name: str, reason: str) -> None:
    for rank in results(name):
        assert reason in rank["refused"]
