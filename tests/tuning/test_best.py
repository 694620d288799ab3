"""``autofit best --memory`` after a real search: another point of the same study."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.analysis.frontier import Point, frontier
from autofit.export import FORMATS
from autofit.export.load import load_plan
from autofit.storage import Store
from autofit.units import exact_size

pytestmark = pytest.mark.full

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def leanest(searched_folder: Path) -> Point:
    """The point of the study with the lowest peak."""
    with Store(str(searched_folder / "autofit.db"), create=False) as store:
        found = frontier(store, store.studies()[0])
    assert len(found) > 1, "the search measured several micro-batch sizes"
    # a confirmed point stays beside a faster and leaner one of the search, so the last may not do
    return min(found, key=lambda point: point.measurement.peak_device)


def test_another_point_of_the_study(
    searched_folder: Path, leanest: Point, command: Command, tmp_path: Path
) -> None:
    peak = leanest.measurement.peak_device
    line = ["best", "train.py", "--memory", f"{peak}B"]
    shown = command(*line, "--format", "json", cwd=searched_folder)
    told = json.loads(shown.stdout)
    assert told["budget_bytes"] == told["peak_bytes"] == peak
    assert told["plan"] == leanest.plan.levels
    assert f"`autofit search` with --memory {exact_size(peak)} confirms what fits" in shown.stderr
    command(*line, "-o", str(tmp_path / "plan.toml"), cwd=searched_folder)
    assert load_plan(tmp_path / "plan.toml") == leanest.plan
    summary = command(*line, cwd=searched_folder).stdout
    assert f"autofit run train.py --plan plan.json --memory {exact_size(peak)}  " in summary


@pytest.mark.full
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_takes_a_budget(
    form: str, searched_folder: Path, leanest: Point, command: Command
) -> None:
    peak = leanest.measurement.peak_device
    line = ["best", "--memory", f"{peak}B", "--format", form, "--partial"]
    done = command(*line, cwd=searched_folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_nothing_known_fits(searched_folder: Path, leanest: Point, command: Command) -> None:
    peak = leanest.measurement.peak_device
    done = command("best", "--memory", f"{peak - 1}B", "--format", "json", cwd=searched_folder)
    assert done.returncode == 3
    assert done.stdout == ""
    assert "no known plan fits" in done.stderr
    assert str(leanest.plan) in done.stderr
    assert len(done.stderr.splitlines()) == 1
