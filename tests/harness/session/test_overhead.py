"""The benchmark of what the plan as is costs runs, and writes what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
def test_the_benchmark_writes_its_figures(root: Path, tmp_path: Path) -> None:
    arguments = ["--preset", "tiny", "--pairs", "1", "--steps", "5", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "overhead.py"), *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "overhead.json").read_text())
    assert [figure["ranks"] for figure in found["figures"]] == [1, 2]
    assert all(figure["ratio"] > 0 for figure in found["figures"])
    assert "benchmarks/overhead.py --preset tiny" in (tmp_path / "overhead.md").read_text()
