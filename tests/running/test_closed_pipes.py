"""Scripts that close the descriptors they find, as daemons do, and autofit's pipes with them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.running import foreground
from autofit.running.foreground import Silent, started
from autofit.worker.launch.launcher import launch
from autofit.worker.launch.tasks import RankTask
from autofit.worker.records.trials import (
    ChildSpec,
    Finished,
    LaunchEnded,
    LaunchRequest,
    Script,
    TrialReport,
)

SOME = "3, 200"
ALL = '3, os.sysconf("SC_OPEN_MAX")'

SCRIPT = """
import os, time
os.closerange({closed})
files = [open("notes", "w") for _ in range(32)]  # they get the numbers that were ours
for file in files:
    file.write("x")
    file.close()
time.sleep({seconds})
"""

Request = Callable[..., LaunchRequest]


@pytest.fixture
def request_for(tmp_path: Path) -> Request:
    def request_for(closed: str, seconds: float = 0.0) -> LaunchRequest:
        text = SCRIPT.format(closed=closed, seconds=seconds)
        (tmp_path / "train.py").write_text(text)
        script = Script(target="train.py", cwd=str(tmp_path))
        return LaunchRequest(
            script=script, plans=(Plan(),), device="cpu", budget=1 << 30, timeout=60
        )

    return request_for


@pytest.mark.quick
@pytest.mark.parametrize("closed", [SOME, ALL])
def test_a_trial_is_heard_or_ends_with_the_reason(request_for: Request, closed: str) -> None:
    *reports, last = list(launch(request_for(closed)))
    assert isinstance(last, LaunchEnded)
    if closed == SOME:
        assert not [each for each in reports if isinstance(each, TrialReport)], last.output
    else:
        assert "the script has closed every file descriptor" in last.output
        (report,) = [each for each in reports if isinstance(each, TrialReport)]
        assert report.verdict == "script_failed"


@pytest.mark.quick
@pytest.mark.parametrize("closed", [SOME, ALL])
def test_a_real_run_goes_on(
    request_for: Request, closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreground, "SILENT_SECONDS", 0.2)
    spec = ChildSpec(mode="run", request=request_for(closed, seconds=1.0))
    with started([RankTask(spec=spec, environment=os.environ)]) as running:
        heard = [type(event) for _, event in running.events()]
        assert running.code == 0
    assert heard == ([Finished] if closed == SOME else [Silent])
    assert (tmp_path / "notes").read_text() == "x"


@pytest.mark.full
def test_the_command_trains_on_and_says_so(tmp_path: Path) -> None:
    train = """
import os, time
import torch
os.closerange({closed})
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
time.sleep(6)
print("done")
"""
    (tmp_path / "plan.json").write_text('{"plan": {"micro_batch": "4"}}')
    run = [sys.executable, "-m", "autofit", "run", "--plan", "plan.json", "train.py"]
    for closed, said in ((SOME, False), (ALL, True)):
        (tmp_path / "train.py").write_text(train.format(closed=closed))
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
        assert ("has closed every file descriptor" in done.stderr) is said
