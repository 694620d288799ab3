"""Steps that take seconds: the traced ones count, where they are like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker.harness.measurement.stages import OBSERVED
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import LaunchEnded, LaunchRequest, Script, TrialReport, Verdict

pytestmark = pytest.mark.full

SCRIPT = """
import sys, time
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(float(sys.argv[1])), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(100):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    time.sleep(4.1)
    optimizer.step()
"""


@pytest.mark.parametrize(("dropout", "steps"), [("0.0", 3), ("0.1", 5)])
def test_as_few_are_taken_as_tell(tmp_path: Path, dropout: str, steps: int) -> None:
    """Without its dropout, which a trace silences, a model needs less memory than it will."""
    (tmp_path / "train.py").write_text(SCRIPT)
    request = LaunchRequest(
        script=Script(target="train.py", args=(dropout,), cwd=str(tmp_path)),
        plans=(Plan(),),
        device="cpu",
        budget=1 << 30,
        timeout=120.0,
    )
    heard = list(launch(request))
    (report,) = [event for event in heard if isinstance(event, TrialReport)]
    assert report.verdict is Verdict.MEASURED
    assert report.measurement is not None
    assert len(report.measurement.step_seconds) == OBSERVED
    assert all(4.1 <= seconds < 5.0 for seconds in report.measurement.step_seconds)
    (ended,) = [event for event in heard if isinstance(event, LaunchEnded)]
    assert ended.steps == steps
