"""Searches on a Ray cluster: every node is used, and what is lost with one runs elsewhere."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autofit.storage import Purpose, TrialRecord
from autofit.worker.records import Verdict

Trials = Callable[..., tuple[TrialRecord, ...]]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.full
def test_a_search_uses_every_node(
    ray_cluster: Any, script: Callable[..., Path], command: Command, trials: Trials
) -> None:
    for _ in range(4):
        ray_cluster.add()
    folder = script().parent
    done = command("search", "train.py", "--address", ray_cluster.address, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 x "), done.stdout
    found = trials(folder)
    assert found[-1].purpose is Purpose.CONFIRM
    assert found[0].verdict is Verdict.MEASURED
