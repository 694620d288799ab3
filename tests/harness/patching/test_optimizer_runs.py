"""``autofit run`` with the optimizer changed: a real script, its losses, and what it saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.told import beside_the_check

SCRIPT = """\
import argparse
import copy
import os

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu")
parser.add_argument("--dtype", default="float32")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--resume")
parser.add_argument("--save")
options = parser.parse_args()
torch.manual_seed(0)
device, dtype = torch.device(options.device), getattr(torch, options.dtype)
model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 256))
model.to(device, dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
scheduler = CosineAnnealingLR(optimizer, 24)
start = 0
if options.resume:
    checkpoint = torch.load(options.resume, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    start = checkpoint["step"]
for step in range(start, start + options.steps):
    tokens = torch.randint(256, (32, 16), generator=torch.Generator().manual_seed(step)).to(device)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() * 7) % 256)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    print(f"loss {loss.item():.15f}")
if options.save:
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "step": start + options.steps,
        },
        options.save,
    )
"""


class Runs:
    """Runs the script, plainly or under a level of the optimizer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)

    def losses(self, level: str, *arguments: str) -> list[float]:
        """Return the losses it printed."""
        command = [sys.executable, "train.py", *arguments]
        if level != "as_is":
            (self.folder / "plan.json").write_text(json.dumps({"plan": {"optimizer": level}}))
            run = [sys.executable, "-m", "autofit", "run", "--plan", "plan.json", "train.py"]
            command = [*run, "--", *arguments]
        done = subprocess.run(
            command,
            cwd=self.folder,
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        assert not beside_the_check(done.stderr), "nothing is said beside what the script says"
        return [float(line.split()[1]) for line in done.stdout.splitlines() if "loss" in line]

    def read(self, name: str) -> dict[str, Any]:
        """Return a checkpoint it saved."""
        found: dict[str, Any] = torch.load(
            self.folder / name, map_location="cpu", weights_only=True
        )
        return found


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.full
def test_a_run_steps_as_the_plan_says(runs: Runs) -> None:
    arguments = ["--steps", "6", "--save", "state.pt"]
    expected = runs.losses("as_is", *arguments)
    found = runs.losses("eight_bit", *arguments)
    assert found == pytest.approx(expected, rel=0.01)
    assert found != expected
    state = runs.read("state.pt")["optimizer"]["state"]
    assert {name for each in state.values() for name in each} == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["fused", "eight_bit"])
def test_it_is_the_same_training_and_the_same_checkpoint(
    runs: Runs, level: str, device: str
) -> None:
    exact = level == "fused"
    same = ["--device", device, "--dtype", "float64" if exact else "float32"]
    expected = runs.losses("as_is", *same, "--save", "plain.pt")
    expected += runs.losses("as_is", *same, "--resume", "plain.pt")
    found = runs.losses(level, *same, "--save", "changed.pt")
    plain, changed = runs.read("plain.pt")["optimizer"], runs.read("changed.pt")["optimizer"]
    assert changed["param_groups"] == plain["param_groups"]
    for index, state in plain["state"].items():
        other = changed["state"][index]
        assert [(k, v.dtype, v.shape) for k, v in other.items()] == [
            (k, v.dtype, v.shape) for k, v in state.items()
        ]
        assert other["step"].device.type == "cpu"
        assert other["step"] == state["step"]
    there = found + runs.losses("as_is", *same, "--resume", "changed.pt")
    back = expected[:12] + runs.losses(level, *same, "--resume", "plain.pt")
    assert len(expected) == 24
    assert expected[-1] < 0.9 * expected[0]
    for losses in (there, back):
        assert losses == pytest.approx(expected, rel=1e-9 if exact else 0.02)
    assert exact or there != expected, "8 bits show"


@pytest.mark.full
@pytest.mark.parametrize("level", ["lion", "sgd", "adafactor"])
def test_another_algorithm_goes_on_from_its_own_checkpoint(runs: Runs, level: str) -> None:
    whole = runs.losses(level, "--steps", "24")
    plain = runs.losses("as_is", "--steps", "24")
    first = runs.losses(level, "--save", "changed.pt")
    assert runs.read("changed.pt")["optimizer"]["algorithm"] == level
    then = runs.losses(level, "--resume", "changed.pt")
    assert first + then == pytest.approx(whole, rel=1e-6)
    assert whole != pytest.approx(plain, rel=1e-3), "another training"
    assert whole[-1] < 0.98 * whole[0], "and one that learns"


@pytest.mark.gpu
def test_eight_bits_lower_the_state_on_a_gpu(tmp_path: Path) -> None:
    """8 bytes a parameter become 2 and a little, and saving takes none on the device."""
    from autofit.plan import Plan
    from autofit.worker.harness.patching.observers import Seams
    from autofit.worker.harness.patching.optimizers import Optimizers

    class Nobody:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            raise AssertionError(name)

    class Owner:
        seams = Seams(Nobody())
        plan = Plan()

        def optimizer_plan(self) -> Plan:
            return self.plan

        def optimizer_refused(self, refusal: Exception) -> None:
            raise refusal

        def optimizer_broke(self, error: Exception) -> bool:
            return False

        def modules(self) -> tuple[torch.nn.Module, ...]:
            return ()

    owner = Owner()
    optimizers = Optimizers(owner)
    optimizers.attach()
    held = {}
    try:
        for level in ("as_is", "fused", "eight_bit"):
            owner.plan = Plan.of({"optimizer": level})
            net = torch.nn.Linear(4096, 4096, device="cuda")
            optimizer = torch.optim.AdamW(net.parameters())
            net(torch.randn(8, 4096, device="cuda")).sum().backward()
            before = torch.cuda.memory_allocated()
            optimizer.step()
            held[level] = torch.cuda.memory_allocated() - before
            torch.cuda.reset_peak_memory_stats()
            top = torch.cuda.memory_allocated()
            torch.save(optimizer.state_dict(), tmp_path / "state.pt")
            largest = 4 * net.weight.numel() if level == "eight_bit" else 0
            assert torch.cuda.max_memory_allocated() - top <= 1.1 * largest + 2**20
            del optimizer, net
    finally:
        optimizers.detach()
    assert held["fused"] == pytest.approx(held["as_is"], rel=0.01)
    assert held["eight_bit"] < 0.27 * held["as_is"]
