"""Memory that runs out in the script's own code: one line says where, and what helps.

Real runs of a real script under a real cap.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from autofit.storage import Store
from tests.told import beside_the_check, ours

CAP = "24MiB"

TRAIN = """\
import sys
import torch
from torch import nn

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(256, 64)
    y = model(x)
{after_forward}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "out.pt")
print("done", [round(float(p.detach().sum()), 12) for p in model.parameters()])
"""


@dataclass(frozen=True)
class Ended:
    """What a run wrote, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> list[str]:
        """The lines that are ours."""
        return ours(self.err)


@dataclass(frozen=True)
class Runner:
    """Writes a script and runs it."""

    folder: Path

    def write(self, after_forward: str) -> None:
        """Write the script, with these lines between its forward and its backward pass."""
        lines = "\n".join(f"    {line}" for line in after_forward.splitlines())
        (self.folder / "train.py").write_text(TRAIN.replace("{after_forward}", lines))

    def plain(self, cap: str | None = None) -> Ended:
        """Run it with Python alone, under the cap or without."""
        capped = [sys.executable, "-m", "autofit.worker.cap", cap, "--"] if cap else []
        return self._run([*capped, sys.executable, "train.py"])

    def tuned(self, cap: str = CAP, levels: dict[str, str] | None = None) -> Ended:
        """Run it under a plan and the cap."""
        plan = self.folder / "plan.json"
        plan.write_text(json.dumps({"plan": levels or {"micro_batch": "1"}}))
        options = ["--plan", str(plan), "--memory", cap, "--storage", f"sqlite:///{self.store}"]
        return self._run([sys.executable, "-m", "autofit", "run", *options, "train.py"])

    @property
    def store(self) -> Path:
        """The file that events are kept in."""
        return self.folder / "autofit.db"

    def _run(self, command: list[str]) -> Ended:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


LOSS = "loss = (y.repeat(1, 16) - x.repeat(1, 16)).pow(2).mean()"


@pytest.mark.quick
def test_one_line_says_where(runner: Runner) -> None:
    """One line: where, what was asked, what was held, what would help; kept in the store."""
    line = "loss = y.repeat(1, 4096).pow(2).mean()"
    runner.write(line)
    Store(str(runner.store)).close()  # a run makes none of its own
    plain, found = runner.plain(CAP), runner.tuned()
    assert found.code == plain.code == 1
    said = beside_the_check(found.err)
    assert said.partition("autofit: ")[0] == plain.err  # the traceback as Python prints it
    said = found.said[-1]
    assert (
        f"out of memory in train.py:14 (`{line}`), outside the model, 512.0 MiB requested" in said
    )
    assert "of 24.0 MiB held" in said
    assert "splitting the batch does not lower the memory of computations outside the model" in said
    rows = sqlite3.connect(runner.store).execute("select payload from event").fetchall()
    assert any(json.loads(row)["line"] == "train.py:14" for (row,) in rows)


@pytest.mark.full
def test_weights_that_do_not_fit(runner: Runner) -> None:
    runner.write(LOSS)
    script = runner.folder / "train.py"
    script.write_text(script.read_text().replace("model = nn", "nn.Linear(4096, 4096)\nmodel = nn"))
    first, said = runner.tuned().said
    assert "attempt 2 starts from the beginning, under sharding full_offload" in first
    assert "train.py:9 (`nn.Linear(4096, 4096)`), before the model first ran, 128.0 MiB" in said
    assert "no technique lowers its weights further; what is left is a smaller model" in said


@pytest.mark.full
def test_the_scripts_own_handler_gets_the_same_exception(runner: Runner) -> None:
    runner.write(
        f"{LOSS}\n"
        "try:\n"
        "    y.repeat(1, 4096)\n"
        "except RuntimeError as error:\n"
        "    print(step, type(error), str(error)[-60:], error.__context__)"
    )
    plain, found = runner.plain(CAP), runner.tuned()
    assert found.code == plain.code == 0
    assert found.out == plain.out
    assert found.said == []
