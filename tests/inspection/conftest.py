"""A small model of four blocks, as a script; one that leaks; and an explanation made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

WIDTH = 96
"""Features between the two layers of a block."""
MODEL = """
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
WIDTHS = {widths}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(32, width)
        self.down = nn.Linear(width, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


model = nn.Sequential(*(Block(width) for width in WIDTHS))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
kept = []
for step in range(40):
    x = torch.randn(64, 32)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {last}
"""


@pytest.fixture(scope="session")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script that keeps the graph of each step's loss."""
    path = tmp_path_factory.mktemp("leaking") / "train.py"
    path.write_text(MODEL.format(widths=[WIDTH] * 4, last="kept.append(loss)"))
    return path


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script in an empty working directory, without a store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOFIT_STORAGE", raising=False)
    path = tmp_path / "train.py"
    path.write_text(MODEL.format(widths=[WIDTH] * 4, last="pass"))
    return path
