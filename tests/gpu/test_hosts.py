"""Two nodes of a Ray cluster on this machine, with a card each: one training over both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autofit.worker import meter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(len(meter.cards()) < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def two_nodes(ray_cluster: Any) -> str:
    """The address of a cluster whose two nodes have one card each."""
    for first in (0, 1):
        ray_cluster.add(f"CPU=1 GPU=1 FIRST={first}")
    return str(ray_cluster.address)


@pytest.mark.parametrize("levels", [{}, {"sharding": "zero1"}, {"sharding": "full"}], ids=str)
def test_the_losses_are_those_of_one_process(
    root: Path, tmp_path: Path, two_nodes: str, levels: dict[str, str]
) -> None:
    example = str(root / "examples" / "char_lm.py")
    arguments = ["--steps", "10", "--losses"]
    subprocess.run([sys.executable, example, *arguments, "plain"], cwd=tmp_path, check=True)
    (tmp_path / "plan.json").write_text(json.dumps({"plan": {"ranks": "2", **levels}}))
    options = ["--plan", "plan.json", "--address", two_nodes]
    done = subprocess.run(
        [sys.executable, "-m", "autofit", "run", *options, example, "--", *arguments, "ranked"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 2 ranks on this host" in done.stderr
    assert "cannot be used" not in done.stderr
    ours, theirs = (
        [float(loss) for loss in (tmp_path / name).read_text().split()]
        for name in ("ranked", "plain")
    )
    assert ours == pytest.approx(theirs, rel=1e-3)
