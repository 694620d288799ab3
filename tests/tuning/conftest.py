"""Searches of a tiny script: steps of a few milliseconds, a peak of some twenty megabytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autofit.plan import Plan
from autofit.storage import State, Store, TrialRecord
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import LaunchRequest, Script, TrialReport

TINY = """\
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
options = parser.parse_args()
torch.manual_seed(0)
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 256)
        self.down = nn.Linear(256, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1).mean(-1)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(options.steps):
    x = torch.randn(64, 32, 16)
    loss = nn.functional.mse_loss(model(x), x.mean((1, 2)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.9f}")
"""


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, and nothing of the user's own settings."""
    monkeypatch.delenv("AUTOFIT_STORAGE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture(scope="session")
def tiny() -> str:
    """The tiny script."""
    return TINY


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write the tiny script, some text of it replaced, to the working directory: an empty one."""
    monkeypatch.chdir(tmp_path)

    def write(old: str = "", new: str = "", name: str = "train.py") -> Path:
        assert old in TINY
        path = tmp_path / name
        path.write_text(TINY.replace(old, new, 1) if old else TINY)
        return path

    return write


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``autofit`` as a person does, in a process of its own."""

    def run(*arguments: str, cwd: Path, **more: Any) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "autofit", *arguments]
        return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=240, **more)

    return run


@pytest.fixture(scope="session")
def budget(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Half of what the script needs as it is."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "train.py").write_text(tiny)
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(folder)),
        plans=(Plan(),),
        device="cpu",
        budget=1 << 30,
        timeout=60,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        (report,) = (each for each in launch(request) if isinstance(each, TrialReport))
    assert report.measurement is not None, report
    return report.measurement.peak_device // 2


@pytest.fixture(scope="session")
def searched_folder(
    command: Callable[..., subprocess.CompletedProcess[str]],
    budget: int,
    tiny: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The folder of a finished search under that budget; tests only read its store."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "train.py").write_text(tiny)
    asked = ["--memory", str(budget), "--without", "precision", "--trials", "4"]
    done = command("search", "train.py", *asked, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def trials() -> Callable[..., tuple[TrialRecord, ...]]:
    """Return the finished trials of the newest study in a folder's store."""

    def read(folder: Path, state: State | None = State.FINISHED) -> tuple[TrialRecord, ...]:
        with Store(str(folder / "autofit.db"), create=False) as store:
            return store.trials(store.studies()[0], state=state)

    return read
