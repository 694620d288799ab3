"""A trial of a plan with ``ranks``: verified and measured, or out of memory on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.equivalence.compare import compare
from autofit.plan import Plan
from autofit.strategies import Fidelity
from autofit.worker.launch.launcher import launch
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import (
    LaunchRequest,
    Script,
    Traced,
    TrialReport,
    Verdict,
    Verified,
)

pytestmark = pytest.mark.full

TRAIN = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(200):
    x = torch.randn(512, 64)
    loss = nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with open("log.txt", "a") as log:
        print(step, file=log)
"""


JOINED = """\
class Joined(nn.Linear):
    def forward(self, x):
        return super().forward(x).softmax(0)


model = Joined(64, 64)
"""


def measured(
    folder: Path, budget: int, text: str = TRAIN, **levels: str
) -> tuple[TrialReport, bool]:
    """Return the report of one plan, and whether a step ran under it, verified."""
    (folder / "train.py").write_text(text)
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(folder)),
        plans=(Plan.of(levels),),
        device="cpu",
        budget=budget,
        timeout=120.0,
    )
    events = list(launch(request))
    (report,) = (each for each in events if isinstance(each, TrialReport))
    return report, any(isinstance(each, Verified) for each in events)


@pytest.mark.parametrize("levels", [{"ranks": "2"}, {"ranks": "3", "micro_batch": "64"}])
def test_it_is_verified_and_measured(tmp_path: Path, levels: dict[str, str]) -> None:
    report, verified = measured(tmp_path, 1 << 30, **levels)
    assert (report.verdict, report.reason) == (Verdict.MEASURED, "")
    assert verified
    assert report.measurement is not None
    assert report.measurement.effective_batch == 512
    assert len(report.measurement.rank_peaks) == int(levels["ranks"])
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("sharding", ["as_is", "zero1", "zero2", "full"])
def test_its_trace_is_that_of_one_process(tmp_path: Path, sharding: str) -> None:
    """Also if the plan has replaced the parameters by sharded ones: whole values are compared."""
    alone = traced(tmp_path)
    spread = traced(tmp_path, ranks="2", sharding=sharding)
    assert spread.names == alone.names
    found = compare(spread, alone, Fidelity.EXACT, splits=False)
    assert (found.drifted, found.obstacle, found.steps) == (None, None, 3)


def traced(folder: Path, **levels: str) -> Trace:
    (folder / "train.py").write_text(TRAIN)
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(folder)),
        plans=(Plan.of(levels),),
        device="cpu",
        budget=1 << 30,
        timeout=120.0,
    )
    (found,) = (each.trace for each in launch(request) if isinstance(each, Traced))
    return found


def test_a_shortage_on_a_rank_is_that_of_the_trial(tmp_path: Path) -> None:
    report, verified = measured(tmp_path, 1 << 20, ranks="2")
    assert report.verdict is Verdict.OUT_OF_MEMORY
    assert not verified


def test_parts_of_a_model_that_joins_samples_are_divided(tmp_path: Path) -> None:
    text = TRAIN.replace("nn.GELU()", "nn.Softmax(0)")
    assert text != TRAIN
    report, verified = measured(tmp_path, 1 << 30, text, ranks="2")
    assert (report.verdict, report.reason) == (Verdict.MEASURED, "")
    assert verified


def test_a_model_that_joins_samples_in_its_only_part_is_refused(tmp_path: Path) -> None:
    model = next(line for line in TRAIN.splitlines(keepends=True) if line.startswith("model ="))
    report, _ = measured(tmp_path, 1 << 30, TRAIN.replace(model, JOINED), ranks="2")
    assert (report.verdict, report.blamed) == (Verdict.REFUSED, "ranks")
    assert "samples" in report.reason
