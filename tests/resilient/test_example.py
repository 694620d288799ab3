"""``examples/resilient_finetune.py`` and ``benchmarks/resilient.py`` run, in little memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

CAP = [sys.executable, "-m", "autofit.worker.cap"]


def run(command: list[str], where: Path) -> str:
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_batch_that_is_four_times_as_long(root: Path, tmp_path: Path) -> None:
    example = [sys.executable, str(root / "examples/resilient_finetune.py"), "--device", "cpu"]
    options = ["--steps", "6", "--memory-hungry", "4", "--width", "32"]
    plain = run([*example, *options, "--losses", "plain"], tmp_path)
    assert plain.startswith("done: 6 steps")
    capped = run([*CAP, "12MiB", "--", *example, *options, "--losses", "capped"], tmp_path)
    assert "out of memory with 32 samples at a time; goes on with 16" in capped
    losses = [
        [float(line) for line in (tmp_path / name).read_text().split()]
        for name in ("plain", "capped")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.full
def test_side_by_side_with_accelerate(root: Path, tmp_path: Path) -> None:
    benchmark = [sys.executable, str(root / "benchmarks/resilient.py"), "--device", "cpu"]
    found = json.loads(run([*CAP, "24MiB", "--", *benchmark, "--batch-size", "32"], tmp_path))
    assert found["autofit"]["effective_batch"] == 32
    assert found["accelerate"]["effective_batch"] < 32
    assert 1 < found["autofit"]["attempts"] <= found["accelerate"]["attempts"]
