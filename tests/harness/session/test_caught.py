"""Scripts that catch a shortage themselves, and go on with a smaller batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import LaunchEnded, LaunchRequest, Script, TrialReport, Verdict

pytestmark = pytest.mark.quick

MODEL = """
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Hungry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.samples = len(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.empty(ctx.samples << 20, dtype=torch.uint8)
        return gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 1)

    def forward(self, x):
        return Hungry.apply(self.line(x))


def backward(loss):
    loss.backward()


def train(batch_size):
    print("batch", batch_size, flush=True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        backward(model(torch.randn(batch_size, 8)).square().mean())
        optimizer.step()
"""
BY_HAND = """
size = 256
while True:
    try:
        train(size)
        break
    except RuntimeError:
        size //= 2
"""
EVERYTHING = BY_HAND.replace("except RuntimeError:", "except:")
AND_STEPS = """
def backward(loss):
    try:
        loss.backward()
    except RuntimeError:
        pass


train(256)
"""
GIVES_UP = """
try:
    train(256)
except RuntimeError:
    print("too large")
"""
BY_ACCELERATE = """
from accelerate.utils import find_executable_batch_size
find_executable_batch_size(train, starting_batch_size=256)()
"""


@pytest.mark.parametrize(
    ("end", "most"),
    [(BY_HAND, 2), (EVERYTHING, 3), (AND_STEPS, 1), (GIVES_UP, 1), (BY_ACCELERATE, 1)],
    ids=["by hand", "everything", "and steps", "gives up", "by accelerate"],
)
def test_the_plan_ran_out_whatever_comes_of_it(tmp_path: Path, end: str, most: int) -> None:
    """What is measured next would be another batch."""
    (tmp_path / "train.py").write_text(MODEL + end)
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path)),
        plans=(Plan(), Plan.of({"micro_batch": "8"})),
        device="cpu",
        budget=100 << 20,
        timeout=60.0,
    )
    heard = list(launch(request))
    (report,) = [event for event in heard if isinstance(event, TrialReport)]
    assert (report.index, report.verdict) == (0, Verdict.OUT_OF_MEMORY)
    assert report.out_of_memory is not None
    assert (report.out_of_memory.phase, report.out_of_memory.steps) == ("backward", 0)
    (ended,) = [event for event in heard if isinstance(event, LaunchEnded)]
    assert ended.steps == (end == AND_STEPS)
    assert 1 <= ended.output.count("batch ") <= most
