"""A trial must learn that memory ran out, whatever the script itself makes of it."""

from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import LaunchRequest, Script, TrialReport, Verdict

SCRIPT = """
import torch
import autofit

@autofit.resilient(batch_size=8)
def train(batch_size):
    if batch_size > 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

train()
"""


@pytest.mark.quick
def test_a_trial_sees_what_the_decorator_would_hide(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path)),
        plans=(Plan(),),
        device="cpu",
        budget=1 << 30,
        timeout=60.0,
    )
    (report,) = [event for event in launch(request) if isinstance(event, TrialReport)]
    assert report.verdict is Verdict.OUT_OF_MEMORY
    assert report.out_of_memory is not None
    assert report.out_of_memory.requested == 1 << 30
