"""Steps in backward under real launches: the same trace, what the first launch learns, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from autofit.equivalence.compare import compare
from autofit.plan import Plan
from autofit.strategies import Fidelity, get
from autofit.worker.launch.launcher import launch
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import (
    LaunchRequest,
    Learned,
    Script,
    Traced,
    TrialReport,
    Verdict,
)

pytestmark = pytest.mark.full

SCRIPT = """\
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--clip", action="store_true")
parser.add_argument("--log-norm", action="store_true")
parser.add_argument("--twice", action="store_true")
parser.add_argument("--steps", type=int, default=30)
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
for step in range(options.steps):
    optimizer.zero_grad()
    for part in range(1 + options.twice):
        x = torch.randn(16, 8)
        loss = nn.functional.mse_loss(model(x).squeeze(-1), x.mean(-1))
        loss.backward()
    if options.clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if options.log_norm:
        norm = sum(float(p.grad.norm()) for p in model.parameters())
    optimizer.step()
    scheduler.step()
    print(f"loss {loss.item()!r}")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the script."""
    folder = tmp_path_factory.mktemp("release")
    (folder / "train.py").write_text(SCRIPT)
    return folder


@cache
def launched(folder: Path, plan: Plan, *args: str) -> list[object]:
    request = LaunchRequest(
        script=Script(target="train.py", args=args, cwd=str(folder)),
        plans=(plan,),
        device="cpu",
        budget=4 << 30,
        timeout=120,
    )
    return list(launch(request))


def trace_of(happened: list[object]) -> Trace:
    (traced,) = (each.trace for each in happened if isinstance(each, Traced))
    return traced


def report_of(happened: list[object]) -> TrialReport:
    (report,) = (each for each in happened if isinstance(each, TrialReport))
    return report


@pytest.mark.parametrize("micro_batch", ["as_is", "4"])
def test_a_traced_step_sees_what_stepped_in_backward(folder: Path, micro_batch: str) -> None:
    expected = trace_of(launched(folder, Plan()))
    plan = Plan.of({"gradient_release": "released", "micro_batch": micro_batch})
    found = launched(folder, plan)
    assert report_of(found).verdict is Verdict.MEASURED, report_of(found)
    assert all(step.gradients for step in trace_of(found).steps)
    comparison = compare(trace_of(found), expected, Fidelity.EXACT, splits=micro_batch != "as_is")
    assert (comparison.drifted, comparison.steps) == (None, 3)


@pytest.mark.parametrize("args", [("--clip",), ("--log-norm",), ("--twice",)], ids=str)
def test_the_first_launch_learns_where_it_does_not_apply(folder: Path, args: tuple[str]) -> None:
    facts = [each.facts for each in launched(folder, Plan(), *args) if isinstance(each, Learned)]
    reason = get("gradient_release").inapplicable("released", facts[-1])
    assert reason == (
        "the script accumulates gradients over several calls"
        if args == ("--twice",)
        else "the script clips or reads the gradients before its step"
    )
    plain = [each.facts for each in launched(folder, Plan()) if isinstance(each, Learned)]
    assert get("gradient_release").inapplicable("released", plain[-1]) is None


@pytest.mark.parametrize("args", [("--clip",), ("--log-norm",), ("--twice",)], ids=str)
def test_a_script_that_would_notice_is_refused(folder: Path, args: tuple[str]) -> None:
    report = report_of(launched(folder, Plan.of({"gradient_release": "released"}), *args))
    assert (report.verdict, report.blamed) == (Verdict.REFUSED, "gradient_release")


def test_a_run_prints_the_script_s_own_losses(folder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"plan": {"gradient_release": "released"}}))
    environment = {**os.environ, "AUTOFIT_STORAGE": str(tmp_path / "autofit.db")}

    def losses(*command: str) -> list[float]:
        ran = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        lines = ran.stdout.splitlines()
        return [float(line.split()[1]) for line in lines if line.startswith("loss ")]

    under = losses("-m", "autofit", "run", "--plan", str(plan), "train.py")
    assert under == losses("train.py")
    assert len(under) == 30
