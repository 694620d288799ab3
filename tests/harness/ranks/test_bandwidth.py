"""How fast ranks communicate, measured between real processes under a real limit of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from autofit.worker import meter
from autofit.worker.launch.environment import free_port
from autofit.worker.meter import build

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(build.shim() is None, reason="the shim needs Linux and a C compiler"),
]

MEASURE = """\
import dataclasses, json, sys
from autofit.worker import meter
gauge = meter.for_device("cpu")
import torch
from autofit.worker.harness.ranks.bandwidth import measure
from autofit.worker.harness.ranks.group import RankGroup
from autofit.worker.records.trials import Meeting

torch.set_num_threads(1)
rank, port, held = map(int, sys.argv[1:])
torch.set_default_dtype(torch.float64)
group = RankGroup.connect(rank, 2, Meeting(port=port, seed=0), "cpu")
kept = torch.zeros(held * rank, dtype=torch.uint8)
own, refused = gauge.current(), gauge.refused()
found = measure(group, gauge)
print(json.dumps({
    "found": found and dataclasses.asdict(found),
    "left": gauge.current() - own,
    "above": gauge.peak().device - own,
    "refused": gauge.refused() - refused,
}))
"""
MIB = 1 << 20
MESSAGES = 4096
"""Bytes of meetings that the connection may free a moment later."""


def measured(held: int) -> list[dict[str, Any]]:
    """Return what two ranks say of 64 MiB each; rank 1 holds ``held`` bytes of them."""
    port = str(free_port())
    environment = {**os.environ, **meter.environment("cpu", 64 * MIB)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEASURE, str(rank), port, str(held)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert not any("deprecated" in errors for _, errors in said), said
    return [json.loads(printed) for printed, _ in said]


def test_ranks_measure_each_kind_and_leave_no_trace() -> None:
    first, second = measured(0)
    assert first["found"] == second["found"]
    assert set(first["found"]) == {"all_reduce", "all_gather", "reduce_scatter"}
    assert all(1e6 < rate < 1e12 for rate in first["found"].values())
    for each in (first, second):
        assert each["refused"] == 0
        assert each["left"] <= MESSAGES
        assert each["above"] <= MESSAGES, "the peak of a trial"


def test_nothing_is_measured_if_one_rank_lacks_the_memory() -> None:
    for each in measured(60 * MIB):
        assert each["found"] is None
        assert each["refused"] == 0
        assert each["left"] <= MESSAGES
