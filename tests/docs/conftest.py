"""The folder in which the documentation's commands and programs run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.prose import ROOT
from tests.ray_head import TOOLS

SCRIPT = """
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    loss = model(torch.randn(32, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
"""
Bash = Callable[[str, Path], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def bash() -> Bash:
    """Return what runs commands in a folder."""

    def run(commands: str, folder: Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run(
            ["bash", "-euxc", commands],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory, bash: Bash) -> Path:
    """A folder as the pages expect it: the examples, and a script that has been searched."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "train.py").write_text(SCRIPT)
    shutil.copytree(ROOT / "examples", folder / "examples")
    bash("autofit search train.py --trials 2", folder)
    return folder
