"""The folder in which the documentation's commands and programs run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
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
torch.save(model.state_dict(), "model.pt")
print(loss.item())
"""
Bash = Callable[[str, Path], subprocess.CompletedProcess[str]]
"""Runs commands in a folder, as a shell does into which they are typed."""


@pytest.fixture(scope="session")
def bash() -> Bash:
    """Return what runs commands; its output is what a terminal shows, errors included."""

    def run(commands: str, folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euc", commands],
            cwd=folder,
            env={
                **os.environ,
                "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}",
                "HOME": str(folder),
                "COLUMNS": "120",
                "MAKEFLAGS": f"BIN={TOOLS} STAMP=",  # what it would install is there
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run


@pytest.fixture(scope="session")
def searched(tmp_path_factory: pytest.TempPathFactory, bash: Bash) -> Path:
    """A folder as the pages expect it: the examples, and a script that has been searched."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "package").mkdir()
    (folder / "package/train.py").write_text(SCRIPT)
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name in ("Makefile", "pyproject.toml", "constraints-cpu.txt"):
        shutil.copy2(ROOT / name, folder)
    ran = bash("autofit search train.py --trials 2", folder)
    assert ran.returncode == 0, ran.stdout
    return folder


@pytest.fixture
def workplace(searched: Path, tmp_path: Path) -> Iterator[Path]:
    """That folder at its path, which a study has in it; as it was, when the test has ended."""
    shutil.copytree(searched, tmp_path / "kept")
    yield searched
    shutil.rmtree(searched)
    shutil.move(tmp_path / "kept", searched)
