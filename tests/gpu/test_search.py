"""A whole search on real cards: within its cap, each launch on a card of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.tuning.controller import search
from autofit.tuning.notices import Notice, StudyStarted, TrialStarted
from autofit.tuning.options import SearchOptions
from autofit.worker import meter
from autofit.worker.records.trials import Script

pytestmark = pytest.mark.gpu

GIB = 1 << 30
TRAIN = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(256, 4096)
        self.down = nn.Linear(4096, 256)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(8)), nn.Linear(256, 1)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(400):
    x = torch.randn(8192, 256, device="cuda")
    loss = nn.functional.mse_loss(model(x), x.mean(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_search(gpus: int, tmp_path: Path) -> None:
    if len(meter.cards()) < gpus:
        pytest.skip(f"needs {gpus} GPUs; the driver shows {len(meter.cards())}")
    (tmp_path / "train.py").write_text(TRAIN)
    heard: list[Notice] = []
    options = SearchOptions(
        script=Script(target="train.py", cwd=str(tmp_path)),
        storage=f"sqlite:///{tmp_path / 'autofit.db'}",
        memory=2 * GIB,
        trials=4,
        gpus=gpus,
        without=frozenset({"compile"}),
    )
    result = search(options, heard.append)
    assert isinstance(heard[0], StudyStarted)
    assert (heard[0].devices, heard[0].hardware.device) == (gpus, "cuda")
    assert GIB // 4 < result.measurement.peak_device <= 2 * GIB
    assert result.measurement.peak_reserved < result.measurement.peak_device
    cards = {each.on for each in heard if isinstance(each, TrialStarted)}
    entries = [card.entry for card in meter.cards()]
    assert cards == ({""} if gpus == 1 else {f"GPU {each}" for each in entries[:gpus]})
