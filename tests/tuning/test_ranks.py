"""A search of a script that trains on two ranks, and the run of what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autofit.plan import Plan
from autofit.storage import TrialRecord
from autofit.worker.launch.launcher import launch
from autofit.worker.meter import build
from autofit.worker.records.trials import LaunchRequest, Script, TrialReport, Verdict

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(build.shim() is None, reason="the shim needs Linux and a C compiler"),
]

Command = Callable[..., subprocess.CompletedProcess[str]]
Trials = Callable[..., tuple[TrialRecord, ...]]


@pytest.fixture
def ranked(root: Path, tmp_path: Path) -> Path:
    """A folder with the script."""
    (tmp_path / "train.py").write_text(
        (root / "tests" / "harness" / "session" / "training_ranks.py").read_text()
    )
    return tmp_path


def torchrun(folder: Path, *args: str) -> None:
    """Run the script as it is, by torch's own launcher."""
    line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        [sys.executable, *line, *args], cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


def same(folder: Path, one: str, other: str) -> float:
    """Return the largest difference of any parameter."""
    first, second = (torch.load(folder / name, weights_only=True) for name in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_a_ddp_script_is_searched_and_run_as_it_is(
    ranked: Path, command: Command, trials: Trials
) -> None:
    """Twenty steps, split in four and checkpointed, with one reduction a step."""
    torchrun(ranked, "--steps", "20", "--out", "plain.pt")
    peak = _peak(ranked)
    searched = command(
        *("search", "train.py", "--gpus-per-trial", "2", "--json", "--allow", "exact"),
        *("--memory", str(peak - (1 << 20)), "--trials", "4"),
        *("--", "--amiss", "larger"),
        cwd=ranked,
    )
    assert searched.returncode == 0, searched.stderr
    found = json.loads(searched.stdout)
    first = trials(ranked)[0]
    assert first.report is not None  # only one rank has no room: the other's eight MiB are enough
    assert first.verdict is Verdict.OUT_OF_MEMORY
    assert first.report.out_of_memory is not None
    assert "rank 1: " in first.report.out_of_memory.message
    assert found["effective_batch"] == 32
    assert len(found["rank_peak_bytes"]) == 2
    assert max(found["rank_peak_bytes"]) == found["peak_bytes"] <= peak - (1 << 20)

    plan = {"plan": {"micro_batch": "4", "checkpointing": "all"}}
    (ranked / "plan.json").write_text(json.dumps(plan))
    ran = command(
        *("run", "train.py", "--plan", "plan.json", "--gpus-per-trial", "2"),
        *("--", "--steps", "20", "--out", "tuned.pt"),
        cwd=ranked,
    )
    assert ran.returncode == 0, ran.stderr
    assert same(ranked, "plain.pt", "tuned.pt") < 1e-9
    for name in ("plain", "tuned"):
        told = json.loads((ranked / f"{name}.json").read_text())
        assert told == {"reductions": 20}


def _peak(folder: Path) -> int:
    """Return what the rank with more to hold needs for the script as it is."""
    script = Script(target="train.py", args=("--amiss", "larger"), cwd=str(folder))
    request = LaunchRequest(
        script=script, plans=(Plan(),), device="cpu", budget=1 << 30, timeout=120, ranks=2
    )
    (report,) = (each for each in launch(request) if isinstance(each, TrialReport))
    assert report.measurement is not None, report
    return report.measurement.peak_device


def test_a_script_with_sharded_weights_is_searched(ranked: Path, command: Command) -> None:
    searched = command(
        *("search", "train.py", "--gpus-per-trial", "2", "--json", "--allow", "exact"),
        *("--trials", "4", "--", "--wrap", "fsdp2"),
        cwd=ranked,
    )
    assert searched.returncode == 0, searched.stderr
    found = json.loads(searched.stdout)
    assert found["effective_batch"] == 32
    assert len(found["rank_peak_bytes"]) == 2


def test_a_bug_on_one_rank_ends_the_search(ranked: Path, command: Command) -> None:
    searched = command(
        *("search", "train.py", "--gpus-per-trial", "2", "--", "--amiss", "bug"), cwd=ranked
    )
    assert searched.returncode == 1
    assert "ValueError: a bug of rank 1 alone" in searched.stderr
