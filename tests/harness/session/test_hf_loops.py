"""Plain loops over Hugging Face's models, as they come, are the same training in a real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autofit.plan import Plan
from tests.harness.real_runs import running
from tests.harness.session import hf_loops

SPLIT = {"micro_batch": "2"}
ROUNDING = 1e-5
"""Largest relative difference of a loss that another order of sums may make; 2e-7 was seen."""


@pytest.mark.quick
@pytest.mark.parametrize("make", hf_loops.LOOPS, ids=lambda make: make.__name__)
def test_it_is_the_same_training(make: Any) -> None:
    expected = hf_loops.losses(make)
    with running(Plan()):
        assert hf_loops.losses(make) == expected
    with running(Plan.of(SPLIT)):
        assert hf_loops.losses(make) == pytest.approx(expected, rel=ROUNDING)


def printed(*command: str) -> dict[str, list[float]]:
    """Run the loops as a script; return the losses of each."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: [*map(float, losses)] for name, *losses in lines}


@pytest.mark.full
def test_as_a_script_it_is_the_same_training(tmp_path: Path) -> None:
    """All six in one process: each new optimizer begins another training."""
    script = hf_loops.__file__
    expected = printed(script)
    assert list(expected) == [make.__name__ for make in hf_loops.LOOPS]
    for levels, rounding in (({}, 0.0), (SPLIT, ROUNDING)):
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps({"plan": levels}))
        storage = f"sqlite:///{tmp_path / 'autofit.db'}"
        found = printed(
            "-m", "autofit", "run", "--plan", str(plan), "--storage", storage, script
        )  # fmt: skip
        assert found.keys() == expected.keys()
        for name, losses in expected.items():
            assert found[name] == pytest.approx(losses, rel=rounding, abs=0.0), name
