"""A kind of device that autofit has never seen: with one file, and without any."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autofit.worker.meter import accelerator

PRETEND = '''
"""A device with memory of its own, behind which the CPU computes."""

from collections.abc import Mapping

from autofit import host
from autofit.facts import Hardware
from autofit.worker.meter.base import Card, Meter
from autofit.worker.meter.kinds.cpu import Cpu, ShimMeter

SIZE = 1 << 30


class Pretend(Cpu):
    name = "pretend"
    visible = "PRETEND_DEVICES"

    def hardware(self, index: int) -> Hardware:
        return Hardware(device=self.name, name="Pretender", total_bytes=SIZE)

    def free_bytes(self, index: int) -> int:
        return min(SIZE, host.free_bytes())

    def cards(self) -> tuple[Card, ...]:
        card = Card(
            entry="0",
            uuid="pretender-0",
            hardware=self.hardware(0),
            free=self.free_bytes(0),
            held=0,
            holders=(),
        )
        return (card,)

    def measured_cards(self, variables: Mapping[str, str]) -> tuple[Card, ...]:
        return self.cards() if variables.get(self.visible, "0") == "0" else ()

    def meter(self, cap: int | None) -> Meter:
        found = ShimMeter.loaded()
        assert found is not None
        found.device = self.name
        return found


KIND = Pretend()
'''

SCRIPT = """
import os

import torch
from torch import nn

model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(40):
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained on", os.environ.get("PRETEND_DEVICES"))
"""

Autofit = Callable[..., str]


@pytest.fixture
def autofit(repository_copy: Path, tmp_path: Path) -> Autofit:
    """Run autofit in a copy to which one file was added."""
    (repository_copy / "worker/meter/kinds/pretend.py").write_text(PRETEND)
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(repository_copy), "CUDA_VISIBLE_DEVICES": ""}

    def autofit(*arguments: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-m", "autofit", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    return autofit


@pytest.mark.full
def test_one_file_is_enough_to_search_and_to_run(autofit: Autofit) -> None:
    assert "Pretender" in autofit("doctor")
    searched = autofit("search", "--memory", "64MiB", "--trials", "4", "train.py")
    assert "Pretender" in searched
    assert "samples/s" in searched
    assert "trained on" in autofit("run", "--memory", "64MiB", "train.py")


@pytest.mark.quick
def test_a_kind_that_is_not_known_counts_as_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def mps(*, check_available: bool = False) -> torch.device:
        return torch.device("mps")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", mps)
    assert accelerator.device() == "cpu"
    assert accelerator.devices() == 0
    assert not accelerator.started()
    assert accelerator.allocated() == accelerator.refused() == 0
    assert accelerator.generators() == ()
    assert not accelerator.recording()
    assert accelerator.Moment().until(accelerator.Moment()) >= 0
    accelerator.record_allocations()
    assert accelerator.recorded_allocations() is None
