"""``make demo`` goes on where it was, whenever it is killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.storage import Purpose, State, Store
from autofit.storage.url import exists
from tests.ray_head import TOOLS

IDLE_SECONDS = 40.0
"""What the search takes at most on two idle cores; it takes several times as long on busy ones."""
COMMAND = ["make", "demo", f"BIN={TOOLS}", "STAMP="]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_it_is_killed_and_called_again(root: Path, tmp_path: Path) -> None:
    shutil.copy(root / "Makefile", tmp_path)
    shutil.copytree(root / "examples", tmp_path / "examples")
    for _ in range(3):
        seconds = random.uniform(0, IDLE_SECONDS / 2)
        before = finished(tmp_path)
        demo = subprocess.Popen(
            COMMAND, cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL
        )
        try:
            demo.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(demo.pid, signal.SIGKILL)
            demo.wait()
        assert before.items() <= finished(tmp_path).items(), f"killed after {seconds} s"
    before = finished(tmp_path)
    first, again = called(tmp_path), called(tmp_path)
    done = finished(tmp_path)
    assert before.items() <= done.items()
    assert len(done) == len(set(done.values())), f"a plan was measured twice: {done}"
    result = [line for line in first.splitlines() if " samples/s in " in line][-1]
    assert result in again
    assert "(new)" not in again


def finished(folder: Path) -> dict[int, tuple[Purpose, Plan]]:
    """Return the finished trials of the only study, by their numbers."""
    storage = str(folder / ".demo/autofit.db")
    if not exists(storage):
        return {}
    with Store(storage) as store:
        studies = store.studies()
        assert len(studies) <= 1
        trials = [trial for study in studies for trial in store.trials(study, state=State.FINISHED)]
    return {trial.number: (trial.purpose, trial.plan) for trial in trials}


def called(folder: Path) -> str:
    ran = subprocess.run(COMMAND, cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
