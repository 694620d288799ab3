"""Memory that runs out outside the model: cleared once, else one line says where and what helps.

Real runs of a real script under a real cap. What is thrown away lies in reference cycles, as
exceptions and closures leave them, so that only a collection frees it.
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

# The parameters take 2 MiB; the logits of a batch 8 MiB, and as much again for each copy.
TRAIN = """\
import gc, sys
import torch
from torch import nn

gc.disable()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
MiB = 1 << 17


def waste(size):
    cycle = [torch.zeros(int(size * MiB))]
    cycle.append(cycle)


model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
big = nn.Parameter(torch.zeros(2 * MiB))
optimizer = torch.optim.{optimizer}
for step in range({steps}):
    x = torch.randn(256, 64)
    y = model(x)
{outside}
    optimizer.zero_grad()
    loss.backward()
{before}
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

    def write(
        self,
        outside: str,
        *,
        before: str = "",
        optimizer: str = "SGD(model.parameters(), lr=0.1)",
        steps: int = 3,
    ) -> None:
        """Write the script: what it does outside the model, and before its optimizer steps."""
        lines = {
            name: "\n".join(f"    {line}" for line in text.splitlines())
            for name, text in (("outside", outside), ("before", before))
        }
        text = TRAIN.replace("{optimizer}", optimizer).replace("{steps}", str(steps))
        for name, line in lines.items():
            text = text.replace(f"{{{name}}}", line)
        (self.folder / "train.py").write_text(text)

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


def assert_cleared(runner: Runner, phase: str) -> None:
    """Plain Python dies of the cap; our run ends as the uncapped one, and says so once."""
    assert "can't allocate memory" in runner.plain(CAP).err
    expected, found = runner.plain(), runner.tuned()
    assert found.code == expected.code == 0, found.err
    assert found.out == expected.out
    (line,) = found.said
    assert f"out of memory in {phase}" in line
    assert line.endswith("caches were cleared, and it went through")


@pytest.mark.quick
def test_an_operation_goes_through_once_caches_are_cleared(runner: Runner) -> None:
    runner.write(f"waste(10)\n{LOSS}")
    assert_cleared(runner, "outside the model")


@pytest.mark.full
def test_the_first_step_of_an_optimizer_goes_through(runner: Runner) -> None:
    # Some parameters' state is made when memory runs out, the large one's is half made.
    runner.write(
        LOSS,
        before="big.grad = torch.ones_like(big)\nwaste(17)",
        optimizer="Adam([*model.parameters(), big], lr=0.01, foreach=True)",
        steps=1,
    )
    assert_cleared(runner, "optimizer step")


@pytest.mark.full
def test_a_step_that_has_begun_is_not_repeated(runner: Runner) -> None:
    hook = (
        "def spoil(optimizer=optimizer):\n"
        "    plain = torch._foreach_sqrt\n"
        "    def short(tensors):\n"
        "        torch._foreach_sqrt = plain  # a second time it would go through\n"
        "        torch.empty(100 * MiB)\n"
        "    torch._foreach_sqrt = short\n"
        "if step == 1:  # in the first step there is nothing yet that could have begun\n"
        "    spoil()"
    )
    runner.write(LOSS, before=hook, optimizer="Adam(model.parameters(), lr=0.01, foreach=True)")
    found = runner.tuned()
    assert "can't allocate memory" in found.err
    assert "attempt 2 starts from the beginning" in found.err, "in another process, if at all"
    assert "caches were cleared" not in found.err


@pytest.mark.full
@pytest.mark.parametrize(
    "line", ["torch.empty(0).resize_(10 * MiB)", "torch.zeros(10 * MiB, out=torch.empty(0))"]
)
def test_what_changes_a_tensor_in_place_is_not_repeated(runner: Runner, line: str) -> None:
    runner.write(f"{LOSS}\nwaste(12)\n{line}")
    found = runner.tuned()
    assert found.code == 1
    assert "train.py:" in found.said[-1]
    assert line in found.said[-1]


@pytest.mark.quick
@pytest.mark.full
def test_it_comes_again(runner: Runner) -> None:
    """One line: where, what was asked, what was held, what would help; kept in the store."""
    line = "loss = y.repeat(1, 4096).pow(2).mean()"
    runner.write(line)
    Store(str(runner.store)).close()  # a run makes none of its own
    plain, found = runner.plain(CAP), runner.tuned()
    assert found.code == plain.code == 1
    said = beside_the_check(found.err)
    assert said.partition("autofit: ")[0] == plain.err  # the traceback as Python prints it
    said = found.said[-1]
    assert f"out of memory in train.py:23 (`{line}`), outside the model, 512.0 MiB asked" in said
    assert "of 24.0 MiB held" in said
    assert "splitting the batch does not reach what is computed outside the model" in said
    rows = sqlite3.connect(runner.store).execute("select payload from event").fetchall()
    assert any(json.loads(row)["line"] == "train.py:23" for (row,) in rows)


@pytest.mark.full
def test_weights_that_do_not_fit(runner: Runner) -> None:
    runner.write(LOSS)
    script = runner.folder / "train.py"
    script.write_text(script.read_text().replace("model = nn", "nn.Linear(4096, 4096)\nmodel = nn"))
    (said,) = runner.tuned().said
    assert "train.py:17 (`nn.Linear(4096, 4096)`), before the model first ran, 128.0 MiB" in said
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
