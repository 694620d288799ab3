"""A script under a uid of its own: what it cannot read, and what it cannot make the parent do."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autofit.plan import Plan
from autofit.worker.launch import other_uid
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import (
    LaunchEnded,
    LaunchRequest,
    Measured,
    Measurement,
    PlanEnded,
    Script,
    TrialReport,
    Verdict,
)
from tests.uids import OTHER, UID, interpreter, open_folder, search_path

READS = "import sys, torch\nprint(open(sys.argv[1]).read())\n"

RANKS = """
import os, torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
print("uid", os.getuid(), flush=True)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
"""

pytestmark = pytest.mark.quick


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder that every uid can reach, and an interpreter that every uid can run."""
    if interpreter() is None:
        pytest.skip("this is not root, or other users cannot run Python here")
    monkeypatch.setattr(sys, "executable", interpreter())
    monkeypatch.setenv("PYTHONPATH", search_path())
    with open_folder() as found:
        yield found


def test_a_script_reads_its_own_folder_and_no_other(folder: Path) -> None:
    for name, uid in (("mine", UID), ("others", OTHER)):
        (folder / name).mkdir()
        (folder / name / "train.py").write_text(READS)
        other_uid.give(folder / name, uid)
    environment = other_uid.environment(os.environ, folder / "home", UID)
    heard = {}
    for name in ("mine", "others"):
        words = (str(folder / name / "train.py"),)
        script = Script(target="train.py", args=words, cwd=str(folder / "mine"))
        request = LaunchRequest(
            script=script, plans=(Plan(),), device="cpu", budget=1 << 30, timeout=60.0
        )
        more = {"environment": environment, "scratch": str(folder), "lone": True, "uid": UID}
        heard[name] = list(launch(request, **more))  # type: ignore[arg-type]
    end = heard["mine"][-1]
    assert isinstance(end, LaunchEnded)
    assert READS in end.output
    (report,) = (each for each in heard["others"] if isinstance(each, TrialReport))
    assert "PermissionError" in report.reason
    assert str(folder / "others" / "train.py") in report.traceback


@pytest.mark.full
def test_ranks_run_under_the_uid(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "train.py").write_text(RANKS)
    other_uid.give(folder / "mine", UID)
    environment = other_uid.environment(os.environ, folder / "home", UID)
    script = Script(target="train.py", cwd=str(folder / "mine"))
    request = LaunchRequest(
        script=script, plans=(Plan(),), device="cpu", budget=4 << 30, timeout=120.0, ranks=2
    )
    heard = list(launch(request, environment=environment, scratch=str(folder), uid=UID))
    (report,) = (each for each in heard if isinstance(each, TrialReport))
    assert report.verdict is Verdict.MEASURED, report.reason
    end = heard[-1]
    assert isinstance(end, LaunchEnded)
    assert f"uid {UID}" in end.output


def test_the_process_has_the_uid_alone(folder: Path) -> None:
    program = "import os; print(os.getuid(), os.getgid(), os.getgroups()); open('new', 'w')"
    other_uid.give(folder, UID)
    line = [sys.executable, "-c", program]
    ran = subprocess.run(line, cwd=folder, stdout=-1, text=True, **other_uid.process_options(UID))
    assert ran.stdout == f"{UID} {UID} []\n"
    assert stat.S_IMODE((folder / "new").stat().st_mode) == 0o600


class Evil:
    """Its pickle calls a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


class Attribute:
    """Its pickle reads an attribute."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (TrialReport, "__init__")


@pytest.mark.parametrize("event", [Evil(), Attribute(), subprocess.Popen, {"a": os.system}])
def test_a_pickle_that_is_no_record_is_refused(event: object) -> None:
    with pytest.raises(pickle.UnpicklingError, match="is no record"):
        other_uid.loads(pickle.dumps(event))


def test_records_come_through() -> None:
    measurement = Measurement(
        micro_batch=4,
        effective_batch=8,
        step_seconds=(0.1,),
        peak_allocated=1,
        peak_reserved=2,
        peak_device=3,
    )
    report = TrialReport(index=0, plan=Plan(), verdict=Verdict.MEASURED, reason="é")
    for event in (Measured(index=0, measurement=measurement), PlanEnded(report=report)):
        assert other_uid.loads(pickle.dumps(event)) == event
