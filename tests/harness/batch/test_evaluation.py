"""A call without gradients that does not fit runs in parts; the allocator really fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autofit.plan import Plan
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import LaunchRequest, Script, TrialReport, Verdict

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What ``short_evaluation.py`` met, case by case."""
    child = Path(__file__).with_name("short_evaluation.py")
    capped = [sys.executable, "-m", "autofit.worker.cap", "64GiB", "--", sys.executable]
    done = subprocess.run([*capped, str(child)], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


RESCUED = ["scores", "plan as is", "loss", "inference mode", "dropout in evaluation mode"]


@pytest.mark.parametrize("case", RESCUED)
def test_it_runs_in_parts(seen: dict[str, Any], case: str) -> None:
    found = seen[case]
    assert found["error"] is None
    assert found["worst"] < 1e-12
    assert len(found["met"]) >= 1
    assert {phase for phase, _ in found["met"]} == {"evaluation"}


def test_the_size_is_kept(seen: dict[str, Any]) -> None:
    assert seen["scores"]["met_again"] == len(seen["scores"]["met"])


def test_a_call_that_fits_is_left_alone(seen: dict[str, Any]) -> None:
    assert seen["room enough"] == {"error": None, "worst": 0.0, "met": [], "met_again": 0}


@pytest.mark.parametrize("case", ["batch norm in training mode", "dropout in training mode"])
def test_what_cannot_be_split_ends_as_it_would_have(seen: dict[str, Any], case: str) -> None:
    assert "can't allocate" in seen[case]["error"]


EVALUATES = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batch, test = torch.randn(512, 64), torch.randn(3000, 64)
while True:
    optimizer.zero_grad()
    (model(batch) - batch).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        model(test)  # 23 MiB, where a chunk's forward and backward take 3
"""


def test_a_trial_goes_on_as_the_run_will(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EVALUATES)
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path)),
        plans=(Plan.of({"micro_batch": "64"}),),
        device="cpu",
        budget=16 << 20,
        timeout=60.0,
    )
    (report,) = [event for event in launch(request) if isinstance(event, TrialReport)]
    assert (report.verdict, report.out_of_memory) == (Verdict.MEASURED, None), report
