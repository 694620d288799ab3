"""Weights in bfloat16 on a card: bytes as NVML sees them, and a model too large in float32."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import LaunchEnded, LaunchRequest, Script, TrialReport, Verdict

pytestmark = pytest.mark.gpu

GIB = 1 << 30
SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(2048, 8192), nn.Linear(8192, 2048)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


HERE
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(40):
    x = torch.randn(16, 2048, device="cuda")
    loss = (model(x) - x.roll(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
"""2 GiB of weights in float32."""
MODEL = "nn.Sequential(*(Block() for _ in range(16)))"
MADE = f'with torch.device("cuda"):\n    model = {MODEL}'
CLASS = """\
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(*(Block() for _ in range(16)))


with torch.device("cuda"):
    model = Net()
"""
MOVED = f'model = {MODEL}.to("cuda")'


def report(folder: Path, script: str, budget: int, **levels: str) -> TrialReport:
    """Return what a launch under a plan reports."""
    (folder / "train.py").write_text(script)
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(folder)),
        plans=(Plan.of(levels),),
        device="cuda",
        budget=budget,
        timeout=300,
        steps=4,
    )
    found = None
    for event in launch(request):
        if isinstance(event, TrialReport):
            found = event
        if isinstance(event, LaunchEnded):
            print(event.output[-3000:])
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("levels", "most"),
    [
        ({"weights": "bf16_master"}, 0.92),
        ({"weights": "bf16_master", "optimizer": "eight_bit"}, 0.65),
        ({"weights": "bf16"}, 0.6),
    ],
    ids=str,
)
def test_it_takes_fewer_bytes(tmp_path: Path, levels: dict[str, str], most: float) -> None:
    script = SCRIPT.replace("HERE", MADE)
    plain = report(tmp_path, script, 20 * GIB).measurement
    found = report(tmp_path, script, 20 * GIB, **levels)
    assert found.verdict is Verdict.MEASURED, (found.reason, found.out_of_memory)
    assert plain is not None
    assert found.measurement is not None
    print(levels, found.measurement.peak_allocated / plain.peak_allocated, found.measurement)
    assert found.measurement.peak_allocated < most * plain.peak_allocated


@pytest.mark.parametrize("script", [MADE, MOVED], ids=["made there", "moved there"])
def test_a_model_trains_where_its_float32_weights_would_not_fit(
    tmp_path: Path, script: str
) -> None:
    """1 GiB in bf16 and what a step needs, for which 2 GiB of float32 leave no room."""
    levels = {
        "weights": "bf16_master",
        "optimizer_offload": "streamed",
        "gradient_release": "released",
    }
    found = report(tmp_path, SCRIPT.replace("HERE", script), 3 * GIB, **levels)
    assert found.verdict is Verdict.MEASURED, (found.reason, found.out_of_memory)
    assert found.measurement is not None
    assert found.measurement.peak_device < 3 * GIB


@pytest.mark.parametrize("script", [CLASS, MOVED], ids=["made there", "moved there"])
def test_a_search_finds_what_only_several_levels_together_hold(tmp_path: Path, script: str) -> None:
    """2 GiB of float32 weights within 2.6 GiB, of which the context and libraries take 0.8."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("HERE", script))
    asked = ["--without", "adapters", "--memory", "2700MiB", "--allow", "recipe", "--json"]
    command = [sys.executable, "-m", "autofit", "search", "train.py", *asked, "--timeout", "120s"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)
    assert found["plan"]["weights"] in ("bf16_master", "bf16")
    assert found["plan"]["gradient_release"] != "as_is"
    assert found["peak_bytes"] <= 2700 << 20
    assert found["launches"] <= 12


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize(("level", "most"), [("lora", 0.4), ("qlora", 0.25)])
def test_adapters_take_fewer_bytes(tmp_path: Path, level: str, most: float) -> None:
    script = SCRIPT.replace("HERE", MADE)
    plain = report(tmp_path, script, 20 * GIB).measurement
    found = report(tmp_path, script, 20 * GIB, adapters=level)
    assert found.verdict is Verdict.MEASURED, (found.reason, found.out_of_memory)
    assert plain is not None
    assert found.measurement is not None
    assert found.measurement.peak_allocated < most * plain.peak_allocated
