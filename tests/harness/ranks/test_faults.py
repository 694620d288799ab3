"""A rank that fails, is killed or goes its own way ends all ranks within seconds, with a reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.full

HEAD = """\
import os, sys, time
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.functional.cross_entropy


def train(steps, labels=lambda: torch.randint(3, (6,))):
    for step in range(steps):
        loss = criterion(model(torch.randn(6, 4)), labels())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


"""
LONG = """
for step, loss in enumerate(train(100000)):
    time.sleep(0.01)
    print(step, flush=True)
"""
OTHER_LABELS = """
import numpy
unseeded = numpy.random.default_rng()
for loss in train(20, lambda: torch.from_numpy(unseeded.integers(3, size=6))):
    pass
"""
OTHER_END = """
first = os.fstat(1).st_rdev != os.stat(os.devnull).st_rdev  # only rank 0 is heard
for step, loss in enumerate(train(1000)):
    if first is EARLIER and step == 5:
        break
print("end", flush=True)
"""
SECOND_ORDER = """
for step in range(5):
    loss = criterion(model(torch.randn(6, 4)), torch.randint(3, (6,)))
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(each.square().sum() for each in first).backward()
    optimizer.step()
"""
ERROR = """
for step, loss in enumerate(train(8)):
    print(step, flush=True)
    if step == 6:
        raise ValueError("a bug of the script")
"""


class Runs:
    """Starts the script in a folder of its own, and leaves no process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, text: str, *, ranks: int = 2) -> subprocess.Popen[str]:
        """Start the script under ``ranks``."""
        (self.folder / "train.py").write_text(HEAD + text)
        (self.folder / "plan.json").write_text(json.dumps({"plan": {"ranks": str(ranks)}}))
        options = ["--plan", "plan.json", "--storage", f"sqlite:///{self.folder}/store.db"]
        process = subprocess.Popen(
            [sys.executable, "-m", "autofit", "run", *options, "train.py"],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, text: str, *, ranks: int = 2) -> tuple[int, str, str]:
        """Run the script to its end; return the exit code and what it wrote."""
        process = self.start(text, ranks=ranks)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """Runs that end with the test."""
    held = Runs(tmp_path)
    yield held
    for process in held.started:
        process.kill()
        process.wait()


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the ranks of a run, in the order of their numbers."""
    found = psutil.Process(process.pid).children()
    return sorted((each for each in found if "harness" in " ".join(each.cmdline())), key=by_age)


def by_age(process: psutil.Process) -> tuple[float, int]:
    """Return what sorts processes by their start."""
    return process.create_time(), process.pid


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_ends_the_run(runs: Runs, victim: int) -> None:
    process = runs.start(LONG, ranks=3)
    assert process.stdout is not None
    assert process.stdout.readline()  # it trains
    ranks = children(process)
    assert len(ranks) == 3
    began = time.monotonic()
    os.kill(ranks[victim].pid, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert process.returncode == 128 + signal.SIGKILL, err
    assert not any(each.is_running() for each in ranks)


def test_other_labels_on_each_rank_are_refused(runs: Runs) -> None:
    _, _, err = runs.run(OTHER_LABELS)
    assert "data is not the same in every process" in err


def test_second_derivatives_are_refused(runs: Runs) -> None:
    code, _, err = runs.run(SECOND_ORDER)
    assert "create_graph" in err
    assert code == 0  # it goes on as the script has it


def test_a_rank_that_stops_earlier_ends_all(runs: Runs) -> None:
    code, out, err = runs.run(OTHER_END.replace("EARLIER", "False"))
    assert "the ranks do not do the same: rank 0 is at a call of Linear" in err
    assert "rank 1 is at the end of the script" in err
    assert (code, out) == (1, "")


def test_the_end_of_rank_0_is_that_of_the_run(runs: Runs) -> None:
    code, out, _ = runs.run(OTHER_END.replace("EARLIER", "True"))
    assert (code, out) == (0, "end\n")


def test_an_error_of_the_script_looks_as_without_autofit(runs: Runs) -> None:
    code, out, err = runs.run(ERROR)
    assert code == 1
    assert out.split() == [str(step) for step in range(7)]
    assert "ValueError: a bug of the script" in err
    assert err.count("Traceback") == 1
    assert "worker/harness" not in err
    assert "[rank" not in err
