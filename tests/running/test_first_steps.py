"""A run compares its first steps with what the search measured, and says why they differ."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autofit.plan import Plan
from autofit.running.first_steps import compared
from autofit.worker import meter
from autofit.worker.harness.session.real_run import RealRun
from autofit.worker.records.trials import FirstSteps, Measurement
from tests.roots import a_run
from tests.told import ours

SCRIPT = """
import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--sleep", type=float, default=0.0)
options = parser.parse_args()


class Samples(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(options.sleep)
        return torch.full((64,), float(index % 7))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step, x in zip(range(options.steps), DataLoader(Samples(), batch_size=options.batch)):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
print(f"{loss.item():.9f}")
"""
LINE = (
    r"autofit: after 20 steps: [\d.]+ samples/s in [\d.]+ [KM]iB"
    r" \([\d.]+ ±[\d.]+ and [\d.]+ [KM]iB in the search\)"
)


@dataclass(frozen=True)
class Searched:
    """A folder with a script and the result of a short search."""

    folder: Path

    def run(self, *arguments: str) -> tuple[str, list[str]]:
        """Return what the script prints, and autofit's lines after the one on the plan."""
        done = self.call("-m", "autofit", "run", "train.py", "--", *arguments)
        first, *lines = ours(done.stderr)
        assert "when searched" in first
        return done.stdout, lines

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the folder."""
        return subprocess.run(
            [sys.executable, *command], cwd=self.folder, capture_output=True, text=True, check=True
        )


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    found = Searched(tmp_path_factory.mktemp("first-steps"))
    (found.folder / "train.py").write_text(SCRIPT)
    found.call(
        *("-m", "autofit", "search", "train.py", "--memory", "1GiB", "--timeout", "60s"),
        *("--", "--steps", "400"),
    )
    return found


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_run_says_what_it_got(searched: Searched) -> None:
    printed, lines = searched.run()
    assert len(lines) == 1
    assert re.match(LINE, lines[0])
    assert printed == searched.call("train.py").stdout


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_slow_loader_is_the_cause(searched: Searched) -> None:
    _, (line,) = searched.run("--sleep", "0.005")
    cause = r"; \d+ % slower: it waits for data \d+ % of the time, not \d+ %"
    assert re.fullmatch(LINE + cause, line)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_larger_batch_is_the_cause(searched: Searched) -> None:
    _, (line,) = searched.run("--batch", "1024")
    assert re.match(LINE, line)
    assert re.search(r"\d+ % larger: .*a step has 1024 samples, not 16$", line)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_run_of_fewer_steps_says_nothing(searched: Searched) -> None:
    assert searched.run("--steps", "19")[1] == []


class Reports(list[Any]):
    """Keeps what a run tells."""

    rank = 0

    def send(self, event: Any) -> None:
        """Keep it."""
        self.append(event)


class Slow(Dataset[torch.Tensor]):
    """Samples that take a while."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.randn(256)


def trained(steps: int = 24, accumulated: int = 2) -> list[FirstSteps]:
    """Return what a run of ``steps`` tells of its first ones: 4 samples a call, from a loader."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    reports = Reports()
    gauge = meter.for_device("cpu")
    run = RealRun(a_run(Plan()), reports, gauge)  # type: ignore[arg-type]
    run.start()
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = iter(DataLoader(Slow(), batch_size=4))
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(accumulated):
                model(next(batches)).square().mean().backward()
            optimizer.step()
    finally:
        run.stop()
    return [each for each in reports if isinstance(each, FirstSteps)]


@pytest.mark.quick
def test_the_first_steps_are_measured_once() -> None:
    (found,) = trained()
    assert (found.steps, len(found.step_seconds), found.effective_batch) == (20, 17, 8)
    assert all(each > 0.008 for each in found.step_seconds), "a step waits for 8 samples"
    assert 0.5 < found.data_wait < 1
    assert (found.compiling, found.others) == (0, 0)
    assert trained(steps=19) == []


@pytest.fixture
def crowded() -> Iterator[None]:
    """Let two busy processes share one CPU with this one."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    burn = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(burn) for _ in range(2)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()
        os.sched_setaffinity(0, allowed)


@pytest.mark.quick
@pytest.mark.usefixtures("crowded")
def test_waits_for_a_cpu_are_measured() -> None:
    (found,) = trained()
    assert found.cpu_wait > 0.1


def first_steps(**changes: Any) -> FirstSteps:
    """Return figures of 16 samples in 0.1 s and 10 MiB, with ``changes``."""
    figures: dict[str, Any] = {
        "steps": 20,
        "step_seconds": (0.1,) * 17,
        "effective_batch": 16,
        "peak_device": 10 << 20,
        "data_wait": 0.0,
        "compiling": 0.0,
        "cpu_wait": 0.0,
        "others": 0,
    }
    return FirstSteps(**(figures | changes))


SLOW = (0.2,) * 17
SAME = "160.0 samples/s in 10.0 MiB (160.0 ±0.0 and 10.0 MiB in the search)"
HALF = "80.0 samples/s in 10.0 MiB (160.0 ±0.0 and 10.0 MiB in the search); 50 % slower: "


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, SAME),
        ({"data_wait": 0.9}, SAME),
        ({"step_seconds": SLOW}, f"{HALF}no cause was found"),
        (
            {"step_seconds": SLOW, "data_wait": 0.4, "others": 1 << 30},
            f"{HALF}it waits for data 40 % of the time, not 10 %",
        ),
        (
            {"step_seconds": SLOW, "compiling": 0.3},
            f"{HALF}it compiles 30 % of the time",
        ),
        (
            {"step_seconds": SLOW, "cpu_wait": 0.5},
            f"{HALF}it waits for a free CPU 50 % of the time",
        ),
        (
            {"step_seconds": SLOW, "data_wait": 0.2, "others": 30 << 30},
            f"{HALF}other processes hold 30.0 GiB of the device",
        ),
        (
            {"step_seconds": SLOW, "effective_batch": 32, "peak_device": 15 << 20},
            "160.0 samples/s in 15.0 MiB (160.0 ±0.0 and 10.0 MiB in the search);"
            " 50 % larger: a step has 32 samples, not 16",
        ),
        (
            {"step_seconds": SLOW, "peak_device": 12 << 20, "data_wait": 0.5},
            "80.0 samples/s in 12.0 MiB (160.0 ±0.0 and 10.0 MiB in the search);"
            " 50 % slower and 20 % larger: it waits for data 50 % of the time, not 10 %",
        ),
        ({"effective_batch": None}, SAME),
    ],
)
def test_the_cause_is_what_was_measured(changes: dict[str, Any], said: str) -> None:
    line = compared(first_steps(**changes), before(), peak=True, shrunk=False)
    assert line == f"after 20 steps: {said}"


@pytest.mark.quick
def test_peaks_that_count_other_memory_are_not_compared() -> None:
    line = compared(first_steps(peak_device=1 << 30), before(), peak=False, shrunk=False)
    assert line == "after 20 steps: 160.0 samples/s (160.0 ±0.0 in the search)"


@pytest.mark.quick
def test_smaller_chunks_are_a_cause() -> None:
    line = compared(first_steps(step_seconds=SLOW), before(), peak=True, shrunk=True)
    assert line.endswith("50 % slower: memory ran short, and it trains in smaller chunks")


def before() -> Measurement:
    """Return what the search measured."""
    return Measurement(
        micro_batch=16,
        effective_batch=16,
        step_seconds=(0.1,) * 5,
        peak_allocated=10 << 20,
        peak_reserved=10 << 20,
        peak_device=10 << 20,
        data_wait=0.1,
    )
