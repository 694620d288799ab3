"""A search for the number of blocks to checkpoint, and the run that follows, on a small script."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker.launch.launcher import launch
from autofit.worker.meter import build
from autofit.worker.records.trials import LaunchRequest, Script, TrialReport

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(build.shim() is None, reason="bytes are counted only with a C compiler"),
]

Command = Callable[..., subprocess.CompletedProcess[str]]

BLOCKS, STEPS = 12, 120
SHORT = 650_000
"""Bytes that a run lacks: about what a block keeps for backward."""
TRANSFORMER = f"""\
import os
import sys

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range({BLOCKS}))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


model, held, code = Net(), [], Block.forward.__code__
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range({STEPS}):
    if step == 5 and "MORE" in os.environ:
        held.append(torch.empty(int(os.environ["MORE"]), dtype=torch.uint8))
    calls = []  # by a profiler: the model itself must not notice that a block runs again
    if step == {STEPS - 1}:
        sys.setprofile(lambda frame, kind, _: calls.append(frame.f_code is code and kind == "call"))
    x = torch.randn(16, 64, 32)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
sys.setprofile(None)
print("calls in a step:", sum(calls))
"""


@pytest.fixture(scope="module")
def searched(
    command: Command, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str], int]:
    """The folder of a finished search, the plan that it found, and its budget."""
    folder = tmp_path_factory.mktemp("blocks")
    (folder / "train.py").write_text(TRANSFORMER)
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(folder)),
        plans=(Plan(),),
        device="cpu",
        budget=1 << 30,
        timeout=60,
    )
    (report,) = (each for each in launch(request) if isinstance(each, TrialReport))
    assert report.measurement is not None, report
    budget = int(0.6 * report.measurement.peak_device)
    asked = ["--memory", str(budget), "--only", "checkpointing", "--json"]
    ran = command("search", "train.py", *asked, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["peak_bytes"] <= budget
    (folder / "found.json").write_text(ran.stdout)
    return folder, found["plan"], budget


def calls_of(ran: subprocess.CompletedProcess[str]) -> int:
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout.rpartition("calls in a step: ")[2])


def test_a_number_between_none_and_all(searched: tuple[Path, dict[str, str], int]) -> None:
    _, plan, _ = searched
    assert 0 < int(plan["checkpointing"]) < BLOCKS - 2


def test_a_run_checkpoints_as_many(
    searched: tuple[Path, dict[str, str], int], command: Command
) -> None:
    folder, plan, budget = searched
    ran = command("run", "train.py", cwd=folder)
    assert calls_of(ran) == BLOCKS + int(plan["checkpointing"])
    file = folder / "plan.json"
    file.write_text(json.dumps({"plan": {"checkpointing": "4"}}))
    ran = command("run", "train.py", "--plan", str(file), "--memory", str(2 * budget), cwd=folder)
    assert calls_of(ran) == BLOCKS + 4


def test_a_run_that_is_short_of_memory_checkpoints_more(
    searched: tuple[Path, dict[str, str], int], command: Command
) -> None:
    """It goes on in the same process, from the call that did not fit."""
    folder, plan, budget = searched
    room = budget - json.loads((folder / "found.json").read_text())["peak_bytes"]
    more = {**os.environ, "MORE": str(room + SHORT)}
    ran = command("run", "train.py", cwd=folder, env=more)
    assert "continuing under checkpointing" in ran.stderr
    assert "attempt" not in ran.stderr
    assert BLOCKS + int(plan["checkpointing"]) < calls_of(ran) <= 2 * BLOCKS
