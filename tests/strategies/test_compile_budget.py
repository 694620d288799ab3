"""What a budget of activations is good for: chunks that would not fit without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import LaunchRequest, Script, TrialReport

pytestmark = pytest.mark.full

SCRIPT = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    def forward(self, x):
        return x + self.mlp(self.norm(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024, 1024) / 1024)
        self.blocks = nn.Sequential(*[Block() for _ in range(6)])
    def forward(self, x):
        return self.blocks(x) * (self.weight @ self.weight @ self.weight).mean()

torch.manual_seed(0)
torch.set_num_threads(1)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(500):
    loss = model(torch.randn(12, 2048, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
"""Each call costs much, whatever its size."""


def test_there_is_room_for_larger_chunks(tmp_path: Path) -> None:
    """Than the same plan without compiling, beside which it is proven all the same."""
    (tmp_path / "train.py").write_text(SCRIPT)
    split = Plan.of({"micro_batch": "auto"})

    def reports(budget: int, *plans: Plan) -> list[TrialReport]:
        request = LaunchRequest(
            script=Script(target="train.py", cwd=str(tmp_path)),
            plans=plans,
            device="cpu",
            budget=budget,
            timeout=400,
        )
        return [event for event in launch(request) if isinstance(event, TrialReport)]

    (neutral,) = reports(2 << 30, Plan())
    assert neutral.measurement is not None
    budget = int(0.75 * neutral.measurement.peak_device)
    plain, within = reports(budget, split, split.replace(compile="budget"))
    assert plain.measurement is not None
    assert 6 <= plain.measurement.micro_batch < 12
    assert within.measurement is not None, within
    assert within.measurement.micro_batch == 12
