"""The comparison of samplers replays recorded grids, and autofit's sampler needs fewer seconds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest

from autofit.plan import Plan
from autofit.space.catalogue import clash
from autofit.strategies import AUTO

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def benchmark(root: Path) -> Iterator[Any]:
    folder = str(root / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import samplers

        yield samplers
    finally:
        sys.path.remove(folder)


def test_each_recorded_plan_is_one_of_autofit(benchmark: ModuleType) -> None:
    grids = benchmark.grids()
    assert len(grids) >= 5
    assert sum(len(rows) for grid in grids.values() for rows in grid.rows.values()) == 234
    for grid in grids.values():
        assert Plan() in grid.rows, "every search begins with the script as it is"
        assert [plan for plan in grid.plans if clash(plan)] == []


def test_expectations_come_from_works_of_other_models(benchmark: ModuleType) -> None:
    """Only the 7B decoder has bf16 weights, and only BERT with 4 sentences has fp16."""
    grids = benchmark.grids()
    assert benchmark.expected_of(grids["llama7b"])["weights", "bf16"] == (1.0, 1.0)
    assert benchmark.expected_of(grids["bert4"])["precision", "fp16"] == (1.0, 1.0)
    slowdown, keeps = benchmark.expected_of(grids["vit64"])["checkpointing", "all"]
    assert 1.2 < slowdown < 1.6
    assert 0.02 < keeps < 0.4


def test_a_trial_costs_what_a_search_would_pay(benchmark: ModuleType) -> None:
    grid = benchmark.grids()["vit64"]
    replay = benchmark.Replay(grid, grid.budgets["card"], None)
    first = replay.measure(Plan())
    assert first.seconds["startup"] == benchmark.STARTUP
    bf16 = Plan.of({"precision": "bf16", "optimizer": "fused", "micro_batch": AUTO})
    second = replay.measure(bf16)
    assert second.seconds["startup"] == 0.0, "the running process can apply these levels"
    assert second.report.measurement.micro_batch == grid.work.batch
    compiled = replay.measure(bf16.replace(compile="regional"))
    assert compiled.seconds["compile"] > 5.0
    sgd = replay.measure(bf16.replace(optimizer="sgd"))
    assert sgd.seconds["startup"] == benchmark.STARTUP, "SGD needs a process of its own"
    assert replay.launches == 2


def test_a_launch_goes_on_after_a_plan_that_does_not_fit(benchmark: ModuleType) -> None:
    grid = benchmark.grids()["llama16"]
    replay = benchmark.Replay(grid, grid.budgets["card"], None)
    assert str(replay.measure(Plan()).report.verdict) == "out_of_memory"
    fitting = replay.measure(Plan.of({"precision": "bf16", "micro_batch": AUTO}))
    assert str(fitting.report.verdict) == "measured"
    assert (fitting.launch, fitting.seconds["startup"]) == (0, 0.0)
    assert fitting.seconds["probe"] < fitting.report.measurement.seconds * len(
        fitting.report.measurements
    ), "a chunk takes less than the step"


def test_autofits_sampler_needs_fewer_seconds_than_random(benchmark: ModuleType) -> None:
    def seconds(sampler: str, seeds: int) -> float:
        found = [benchmark.search("bert32", "card", sampler, seed) for seed in range(seeds)]
        assert all(each.alone for each in found)
        return fmean(each.seconds for each in found)

    assert seconds("autofit", 1) <= 0.7 * seconds("random", 12)


@pytest.mark.full
def test_the_command_writes_its_page(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(root / "benchmarks" / "samplers.py"), "--work", "llama7b"]
    options = ["--sampler", "autofit", "TPE", "--seeds", "2", "--out", str(tmp_path)]
    subprocess.run([*command, *options], check=True, capture_output=True, timeout=300)
    assert "| llama7b |" in (tmp_path / "samplers.md").read_text()
