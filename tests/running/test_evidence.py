"""A plan that was verified under other arguments of the script: what they change is noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick
SCRIPT = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--smoothing", type=float, default=0.0)
parser.add_argument("--count", action="store_true", help="print the samples of each forward")
parser.add_argument("--whole", action="store_true", help="a loss that no part of a batch can tell")
options = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(options.dropout)

    def forward(self, x, y):
        if options.count:
            print(len(x), end=" ")
        scores = self.two(self.drop(self.one(x).relu()))
        loss = nn.functional.cross_entropy(scores, y, label_smoothing=options.smoothing)
        return loss + scores.mean(0).square().sum() if options.whole else loss


torch.manual_seed(0)
model = Net().double()
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
for _ in range(options.steps):
    x, y = torch.randn(8, 6).double(), torch.randint(4, (8,))
    optimizer.zero_grad()
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.9f}")
"""


class Runs:
    """Runs the script by itself and under one plan."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "train.py").write_text(SCRIPT)
        (folder / "plan.json").write_text(json.dumps({"plan": {"micro_batch": "3"}}))

    def tuned(self, *arguments: str) -> tuple[str, str]:
        """Return what the script prints under the plan, and what autofit says."""
        options = ["--plan", "plan.json", "--storage", "sqlite:///autofit.db"]
        return self._run("-m", "autofit", "run", *options, "train.py", "--", *arguments)

    def plain(self, *arguments: str) -> str:
        """Return what the script prints by itself."""
        return self._run("train.py", *arguments)[0]

    def _run(self, *command: str) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, *command], cwd=self._folder, capture_output=True, text=True, check=True
        )
        return done.stdout, done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("evidence"))
    out, said = made.tuned()
    assert out == made.plain()
    assert "is verified first" in said
    return made


def test_other_steps_and_another_rate_are_the_same_training(runs: Runs) -> None:
    arguments = ("--steps", "9", "--lr", "0.01")
    out, said = runs.tuned(*arguments)
    assert out == runs.plain(*arguments)
    assert said == ""


def test_a_run_calls_the_model_for_its_chunks_alone(runs: Runs) -> None:
    """Batches with other labels come too, and no call is a check."""
    out, said = runs.tuned("--count", "--steps", "6", "--lr", "0.01")
    assert said == ""
    calls = [sorted(line.split()[:-1]) for line in out.splitlines()]
    assert calls == [["2", "3", "3"]] * 6


@pytest.mark.parametrize(
    "arguments",
    [("--dropout", "0.5"), ("--smoothing", "0.2"), ("--whole",)],
    ids=["dropout", "label smoothing", "a loss over the batch"],
)
def test_what_nobody_has_verified_runs_whole_and_is_told(
    runs: Runs, arguments: tuple[str, ...]
) -> None:
    out, said = runs.tuned(*arguments)
    assert out == runs.plain(*arguments)
    (line,) = said.splitlines()
    assert "runs in one piece, as the script has it" in line
