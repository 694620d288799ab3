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
parser.add_argument("--whole", action="store_true", help="a loss that no part of a batch can tell")
options = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(options.dropout)

    def forward(self, x, y):
        scores = self.two(self.drop(self.one(x).relu()))
        loss = nn.functional.cross_entropy(scores, y, label_smoothing=options.smoothing)
        return loss + scores.mean(0).square().sum() if options.whole else loss


torch.manual_seed(0)
model = Net().double()
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
for _ in range(options.steps):
    x, y = torch.randn(8, 6).double(), torch.randint(4, (8,))
    loss = model(x, y)
    optimizer.zero_grad()
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


@pytest.mark.parametrize(
    "arguments",
    [
        ("--steps", "9", "--lr", "0.01"),
        ("--dropout", "0.5"),
        ("--smoothing", "0.2"),
    ],
    ids=["steps and rate", "dropout", "label smoothing"],
)
def test_it_is_the_same_training_without_another_launch(
    runs: Runs, arguments: tuple[str, ...]
) -> None:
    out, said = runs.tuned(*arguments)
    assert out == runs.plain(*arguments)
    assert said == ""


def test_a_loss_that_cannot_be_split_runs_whole_and_is_told(runs: Runs) -> None:
    out, said = runs.tuned("--whole")
    assert out == runs.plain("--whole")
    (line,) = said.splitlines()
    assert "micro 3" in line or "in one piece" in line
