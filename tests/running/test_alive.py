"""A run that dies for want of memory is started again, one rung leaner; nothing else is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from autofit import host
from tests.told import beside_the_check, ours

CAP = ("--memory", "32MiB")
RESUME = ("--resume-arg", "--resume {checkpoint}")
LEAK = "leaked.append(torch.zeros(128 << 10))"  # 1 MiB a step
SPLIT = {"micro_batch": "8"}

# A step peaks at about 30 MiB as it is, at 20 with 8 samples at a time.
TRAIN = """\
import argparse, os
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--resume")
options = parser.parse_args()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
torch.set_num_threads(1)
attempt = int(os.environ.get("AUTOFIT_ATTEMPT", "1"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1).mean(-1)


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
start = 0
if options.resume:
    state = torch.load(options.resume)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
print(f"attempt {attempt} from {start}", flush=True)
leaked = []
for step in range(start, options.steps):
    torch.manual_seed(step)
    x = torch.randn(16, 32, 64)
    # here
    loss = nn.functional.mse_loss(model(x), x.mean((1, 2)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 10 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, f"step{step + 1}.pt")
torch.save(model.state_dict(), "final.pt")
print("done", flush=True)
"""

Levels = dict[str, str]


@dataclass(frozen=True)
class Runner:
    """Runs the script in a folder of its own."""

    folder: Path

    def write(self, text: str = "") -> Path:
        """Write the script, with some lines where a step begins."""
        lines = text.splitlines() or ["pass"]
        script = self.folder / "train.py"
        script.write_text(TRAIN.replace("# here", "\n    ".join(lines)))
        return script

    def plain(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it with Python alone."""
        return self._run([sys.executable, "train.py", *arguments])

    def command(self, levels: Levels, *options: str) -> list[str]:
        """Return the command that runs it under a plan."""
        plan = self.folder / "plan.json"
        plan.write_text(json.dumps({"plan": levels}))
        run = [sys.executable, "-m", "autofit", "run", "--plan", str(plan), *options]
        return [*run, "train.py"]

    def tuned(
        self, levels: Levels, *options: str, arguments: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run it under a plan."""
        return self._run([*self.command(levels, *options), "--", *arguments])

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True)


NO_MODEL = """
import torch

weight = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
for _ in range(3):
    (torch.randn(8, 4) @ weight - 1).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("AUTOFIT_STORAGE", raising=False)
    return Runner(tmp_path)


@pytest.fixture
def kernel_limit() -> Iterator[Callable[[int], list[str]]]:
    """Return what gives a command, put before it, a control group with a limit in bytes.

    Skips where none can be made: that takes the right to, and a control group of version 1 or 2.
    """
    made: list[Path] = []

    def limit(size: int) -> list[str]:
        for own in host.cgroup_folders()[:1]:
            group = own / f"autofit-test-{os.getpid()}"
            try:
                group.mkdir()
            except OSError:
                break
            made.append(group)
            name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
            (group / name).write_text(str(size))
            join = f'echo $$ > "{group}/cgroup.procs" && exec "$0" "$@"'
            return ["bash", "-c", join]
        pytest.skip("no control group can be made here")

    yield limit
    for group in made:
        group.rmdir()


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = torch.load(one), torch.load(other)
    assert first.keys() == second.keys()
    for name, weight in first.items():
        torch.testing.assert_close(weight, second[name], rtol=1e-9, atol=1e-12)


@pytest.mark.full
def test_a_leak_goes_on_from_its_checkpoint(runner: Runner) -> None:
    runner.write(LEAK)
    assert runner.plain("--steps", "40").returncode == 0
    (runner.folder / "final.pt").rename(runner.folder / "plain.pt")
    done = runner.tuned(SPLIT, *CAP, *RESUME, arguments=("--steps", "40"))
    assert done.returncode == 0, done.stderr
    attempts = [line for line in done.stdout.splitlines() if line.startswith("attempt")]
    assert attempts[0] == "attempt 1 from 0"
    assert len(attempts) > 1
    assert attempts[1].startswith("attempt 2 from ")
    assert attempts[1] != "attempt 2 from 0"
    again = [line for line in ours(done.stderr) if "starts from" in line]
    assert len(again) == len(attempts) - 1
    assert "under micro 4" in again[0]
    assert_same_weights(runner.folder / "final.pt", runner.folder / "plain.pt")


@pytest.mark.quick
def test_a_plan_that_met_no_model_is_not_passed_over_in_silence(runner: Runner) -> None:
    (runner.folder / "train.py").write_text(NO_MODEL)
    done = runner.tuned(SPLIT, *CAP)
    assert done.returncode == 0, done.stderr
    (line,) = ours(done.stderr)
    assert "called no model with gradients: micro 8 was not applied" in line


@pytest.mark.full
def test_a_bug_is_not_run_again(runner: Runner) -> None:
    runner.write("if step == 3: 1 / 0")
    plain = runner.plain()
    done = runner.tuned(SPLIT, *CAP, *RESUME)
    assert (done.returncode, done.stdout) == (1, "attempt 1 from 0\n")
    assert beside_the_check(done.stderr) == plain.stderr
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.full
def test_the_last_rung_fails_as_the_script_does(runner: Runner) -> None:
    runner.write("torch.zeros(64 << 20)")  # 256 MiB at once: no plan helps
    done = runner.tuned({"micro_batch": "1", "checkpointing": "all"}, *CAP)
    assert done.returncode == 1
    assert "can't allocate memory" in done.stderr
    assert done.stdout.count("attempt") == 1
    (line,) = ours(done.stderr)
    assert "before the model first ran" in line
    assert "less of that memory than checkpointing, micro 1" in line


@pytest.mark.full
def test_at_most_three_attempts_change_nothing(runner: Runner) -> None:
    """26 MiB requested beside the model, which holds more than what is left at every rung."""
    runner.write("torch.zeros(13 << 18) if step == 2 else None")
    done = runner.tuned({}, *CAP)
    assert done.returncode == 1
    attempts = done.stdout.count("attempt")
    *again, end = ours(done.stderr)
    assert attempts == len(again) + 1 == 4, done.stderr
    assert "micro 1" in end
    assert "outside the model" in end


@pytest.mark.full
def test_a_rung_that_does_not_hold_is_left_out(runner: Runner) -> None:
    """The hook would see the gradient of each part: the batch is not split."""
    runner.write("model.head.weight.register_hook(lambda gradient: None)")
    done = runner.tuned({}, "--memory", "14MiB")
    assert done.returncode == 0, done.stderr
    (hooked,) = [line for line in ours(done.stderr) if "a hook of the script" in line]
    assert "host memory" in hooked, "no rung splits the batch"
    assert "done" in done.stdout


@pytest.mark.full
def test_a_plan_of_the_scripts_own_is_not_added(runner: Runner) -> None:
    """``@autofit.resilient`` in the script is off: the plan is on the model once."""
    runner.write()
    assert runner.plain("--steps", "5").returncode == 0
    (runner.folder / "final.pt").rename(runner.folder / "plain.pt")
    script = runner.write()
    head, training = script.read_text().split("model = Net()")
    start, loop = training.split("for step in", 1)
    lines = (
        f"model = Net(){start}model, optimizer = plan.apply(model, optimizer)\nfor step in{loop}"
    )
    body = "".join(f"    {line}\n" for line in lines.splitlines())
    script.write_text(
        f"import autofit\n{head}\n@autofit.resilient\ndef train(plan):\n{body}\ntrain()\n"
    )
    done = runner.tuned({"micro_batch": "8"}, *CAP, arguments=("--steps", "5"))
    assert (done.returncode, done.stdout) == (0, "attempt 1 from 0\ndone\n"), done.stderr
    assert_same_weights(runner.folder / "final.pt", runner.folder / "plain.pt")


@pytest.mark.full
def test_a_signal_reaches_the_script_and_ends_the_run(runner: Runner) -> None:
    runner.write(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('told', flush=True), sys.exit(7)))\n"
        "print('ready', flush=True) if step == 5 else None\n"
        "time.sleep(0.05)"
    )
    command = [*runner.command(SPLIT, *CAP, *RESUME), "--", "--steps", "400"]
    with subprocess.Popen(
        command, cwd=runner.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=20)
    assert (process.returncode, out, ours(errors)) == (7, "told\n", [])


@pytest.mark.full
def test_killed_by_the_kernel(runner: Runner, kernel_limit: Callable[[int], list[str]]) -> None:
    """Host memory, which no cap of ours sees, runs into a control group's limit."""
    runner.write("leaked.append(bytearray(8 << 20)) if attempt == 1 else None")
    command = [*runner.command(SPLIT, *RESUME), "--", "--steps", "200"]
    done = subprocess.run(
        [*kernel_limit(900 << 20), *command], cwd=runner.folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "attempt 2 from " in done.stdout
    assert "attempt 2 from 0\n" not in done.stdout
    (line,) = [line for line in ours(done.stderr) if "starts from" in line]
    assert "for lack of memory" in line


@pytest.mark.full
def test_a_kill_that_memory_did_not_cause_is_not_run_again(runner: Runner) -> None:
    runner.write("if step == 5: os.kill(os.getpid(), 9)")
    done = runner.tuned(SPLIT, *CAP, *RESUME)
    assert (done.returncode, done.stdout) == (128 + 9, "attempt 1 from 0\n")


@pytest.mark.full
def test_a_leak_that_ends_at_step_300(runner: Runner) -> None:
    runner.write("leaked.append(torch.zeros(10 << 10))")  # 80 KiB a step: 24 MiB at step 300
    done = runner.tuned(SPLIT, *CAP, *RESUME, arguments=("--steps", "400"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    assert 2 <= done.stdout.count("attempt") <= 4
    assert len(ours(done.stderr)) <= 8


@pytest.mark.full
def test_a_batch_that_is_four_times_longer(runner: Runner) -> None:
    """Rescued in its step: the process lives on, and the weights are the plain run's."""
    runner.write("if step == 250: x = x.repeat(1, 4, 1)")
    arguments = ("--steps", "300")
    assert runner.plain(*arguments).returncode == 0
    (runner.folder / "final.pt").rename(runner.folder / "plain.pt")
    started = time.monotonic()
    done = runner.tuned(SPLIT, *CAP, arguments=arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "attempt 1 from 0\ndone\n"
    (line,) = ours(done.stderr)
    assert "continuing with smaller parts of the batch" in line
    assert time.monotonic() - started < 120
    assert_same_weights(runner.folder / "final.pt", runner.folder / "plain.pt")
