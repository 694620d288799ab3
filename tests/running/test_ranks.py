"""``autofit run`` over two gloo ranks: as ``torchrun`` has it, and what one's end means to all."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.told import ours

TRAIN = """\
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn

def say(text):
    os.write(1, f"{text}\\n".encode())  # at once: ranks share the pipe


torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
attempt = int(os.environ.get("AUTOFIT_ATTEMPT", "1"))
say(f"attempt {attempt} rank {rank} of {world}")
# before
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
net.append(nn.Linear(128, 1))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 8):
    torch.manual_seed(step * world + rank)
    x = torch.randn(64, 32)
    # here
    loss = nn.functional.mse_loss(model(x).squeeze(-1), x.mean(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
say(f"done {rank}")
if rank == 0:
    torch.save(net.state_dict(), "final.pt")
dist.barrier()  # else gloo may stop or abort the process at its end
dist.destroy_process_group()
"""

ACCELERATED = """\
import os, sys
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=16)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for x in data:
    optimizer.zero_grad()
    accelerator.backward(model(x).square().mean())
    optimizer.step()
who, world = accelerator.process_index, accelerator.num_processes
os.write(1, f"{who} of {world} in {accelerator.mixed_precision}: {sys.argv[1:]}\\n".encode())
accelerator.wait_for_everyone()  # else gloo may stop or abort the process at its end
accelerator.end_training()
"""

TORCHRUN = ("torchrun", "--nproc-per-node", "2", "train.py")
LOOP = """\
if step == 2:
    say("ready")
time.sleep(0.05)"""
HANDLER = """\
def told(number, frame):
    say(f"rank {rank} told {number}")
    sys.exit(5)
signal.signal(signal.SIGTERM, told)
"""


@dataclass(frozen=True)
class Runner:
    """Runs the script in a folder of its own."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def write(self, here: str = "pass", before: str = "pass") -> Path:
        """Write the script, with some lines where a step begins and before the model is made."""
        script = self.folder / "train.py"
        inner = "\n    ".join(here.splitlines())
        script.write_text(TRAIN.replace("# here", inner).replace("# before", before))
        return script

    def command(self, levels: dict[str, str], *options: str, line: tuple[str, ...]) -> list[str]:
        """Return the command that runs a launch line under a plan."""
        plan = self.folder / "plan.json"
        plan.write_text(json.dumps({"plan": levels}))
        autofit = [sys.executable, "-m", "autofit", "run", "--plan", str(plan), *options]
        return [*autofit, *line]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end, and return what it wrote."""
        process = self.start(*command)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def tuned(
        self, levels: dict[str, str], *options: str, arguments: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run two ranks under a plan."""
        return self.run(*self.command(levels, *options, line=("--", *TORCHRUN, *arguments)))

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start it in a process group of its own."""
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("AUTOFIT_STORAGE", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    runner = Runner(tmp_path)
    yield runner
    for process in runner.started:
        assert not members(process.pid), "a rank is left"


def members(group: int) -> list[int]:
    """The processes of a group that are alive; they are given a moment to be gone."""
    deadline = time.monotonic() + 10
    while True:
        alive = [pid for pid, its in groups().items() if its == group]
        if not alive or time.monotonic() > deadline:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            return alive
        time.sleep(0.1)


def groups() -> dict[int, int]:
    """The process group of each process that is no zombie."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if state != "Z":
                found[int(folder.name)] = int(group)
    return found


def wait_for(process: subprocess.Popen[str], line: str, times: int = 2) -> None:
    """Read its output until it has written a line with these words so often."""
    assert process.stdout is not None
    while times:
        written = process.stdout.readline()
        assert written, "it ended before"
        times -= line in written


@pytest.mark.full
def test_ranks_train_as_under_torchrun(runner: Runner) -> None:
    runner.write()
    plain = runner.run(*TORCHRUN)
    assert plain.returncode == 0, plain.stderr
    expected = torch.load(runner.folder / "final.pt")
    (runner.folder / "final.pt").unlink()
    done = runner.tuned({"micro_batch": "16"})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert ours(done.stderr) == []
    for name, weight in torch.load(runner.folder / "final.pt").items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.full
def test_one_rank_of_torchrun_has_its_variables(runner: Runner) -> None:
    runner.write()
    line = ("--", "torchrun", "train.py", "2")
    done = runner.run(*runner.command({}, line=line))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "attempt 1 rank 0 of 1\ndone 0\n"


@pytest.mark.full
def test_the_option_starts_ranks_without_a_launch_line(runner: Runner) -> None:
    runner.write()
    line = ("train.py", "--", "2")
    done = runner.run(*runner.command({}, "--gpus-per-trial", "2", line=line))
    assert done.returncode == 0, done.stderr
    assert "attempt 1 rank 1 of 2" in done.stdout


@pytest.mark.full
def test_ranks_of_accelerate_meet_with_what_it_sets(runner: Runner) -> None:
    script = runner.folder / "train.py"
    script.write_text(ACCELERATED)
    launch = ("accelerate", "launch", "--num_processes", "2", "--mixed_precision", "bf16")
    done = runner.run(*runner.command({"micro_batch": "8"}, line=("--", *launch, "train.py", "x")))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} of 2 in bf16: ['x']" for rank in (0, 1)]
    assert len(ours(done.stderr)) == 1, "accelerate itself would start one process"


@pytest.mark.full
def test_what_a_launch_line_was_searched_with_is_what_runs(runner: Runner) -> None:
    """Searched by its launch line; shown and run by the lines that the search ends with."""
    runner.write()
    autofit = str(Path(sys.executable).with_name("autofit"))
    options = ("--memory", "1GiB", "--only", "micro_batch", "--trials", "2")
    done = runner.run(autofit, "search", *options, "--", *TORCHRUN, "100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each training has 2 ranks, as the launch line says" in done.stdout
    commands = [line for line in done.stdout.splitlines() if line.startswith("   autofit")]
    run, best = (shlex.split(line.rstrip().split("   ")[1]) for line in commands[:2])
    assert run == ["autofit", "run", "--", *TORCHRUN, "100"]
    found = json.loads(runner.run(autofit, *best[1:]).stdout)
    assert found["ranks"] == 2
    assert found["script"]["launcher"] == list(TORCHRUN[:-1])
    assert found["effective_batch"] == 128
    for command in (run[1:], ["run", "train.py", "--", "100"]):
        done = runner.run(autofit, *command)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines())[-2:] == ["done 0", "done 1"]
        assert "torchrun --nproc-per-node 2 train.py 100" in ours(done.stderr)[0]


@pytest.mark.full
def test_memory_that_one_rank_runs_out_of_starts_all_again(runner: Runner) -> None:
    leak = "leaked = locals().get('leaked', [])\nif (rank, attempt) == (1, 1): "
    runner.write(f"{leak}leaked.append(torch.zeros(1 << 20))")  # 8 MiB a step
    done = runner.tuned({"micro_batch": "32"}, "--memory", "32MiB")
    assert done.returncode == 0, done.stderr
    again = [f"attempt 2 rank {rank} of 2" for rank in (0, 1)]
    assert set(again) <= set(done.stdout.splitlines()), done.stderr
    assert done.stdout.count("done") == 2
    (line,) = ours(done.stderr)
    assert "attempt 2 starts from the beginning" in line


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "code"),
    [("sys.exit(3)", 3), ("1 / 0", 1), ("os.kill(os.getpid(), signal.SIGKILL)", 137)],
    ids=["its own exit code", "an exception", "killed"],
)
def test_the_first_rank_that_fails_ends_the_others(runner: Runner, how: str, code: int) -> None:
    """Rank 0 waits for rank 1 in a reduction, and would not heed SIGTERM."""
    before = "signal.signal(signal.SIGTERM, lambda *_: None)"
    runner.write(f"if (rank, step) == (1, 3): {how}\nif step == 3: time.sleep(600)", before)
    start = time.monotonic()
    done = runner.tuned({})
    assert done.returncode == code, done.stderr
    assert time.monotonic() - start < 60
    assert "attempt 2" not in done.stdout
    assert "done" not in done.stdout
    assert done.stderr.count("Traceback") == ("1 / 0" in how)


@pytest.mark.full
def test_who_only_lost_another_is_not_the_one_that_failed(runner: Runner) -> None:
    """Rank 0 hears of it first, by an error of gloo; rank 1 takes a while to say why."""
    leaves = "dist.destroy_process_group(); time.sleep(1); raise ValueError('its own')"
    runner.write(f"if (rank, step) == (1, 3): {leaves}")
    done = runner.tuned({})
    assert done.returncode == 1
    assert "ValueError: its own" in done.stderr


@pytest.mark.full
def test_a_plan_that_one_rank_refuses_is_given_up_by_all(runner: Runner) -> None:
    """The hook would see the gradient of each part: the batch is not split."""
    hook = "if rank == 1 and step == 0: net[-1].weight.register_hook(lambda gradient: None)"
    runner.write(hook)
    start = time.monotonic()
    done = runner.tuned({"micro_batch": "16"})
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 60
    assert "cannot be used here: " in done.stderr
    assert "done" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize("beside", [(), ("torchrun", "--nproc-per-node", "2", "--no-python")])
def test_what_does_not_hold_over_ranks_is_refused(runner: Runner, beside: tuple[str, ...]) -> None:
    """The masters' gradients would be each rank's own: the ranks would drift apart unseen."""
    runner.write(before="torch.set_default_dtype(torch.float32)")
    line = ("train.py",) if beside else ("--", *TORCHRUN)
    done = runner.run(*beside, *runner.command({"weights": "bf16_master"}, line=line))
    assert "with several ranks" in done.stderr
    if beside:  # another launcher has started the ranks, so autofit cannot start them again
        assert done.returncode == 1
        assert "done" not in done.stdout
    else:
        assert done.returncode == 0
        assert "continuing under as it is" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_every_rank(runner: Runner, number: signal.Signals) -> None:
    before = HANDLER.replace("signal.SIGTERM", str(int(number)))
    runner.write(LOOP, before)
    process = runner.start(*runner.command({}, line=("--", *TORCHRUN, "10000")))
    wait_for(process, "ready")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 5, err
    assert sorted(out.splitlines()) == [f"rank {rank} told {int(number)}" for rank in (0, 1)]


@pytest.mark.full
def test_ctrl_c_ends_all_ranks(runner: Runner) -> None:
    runner.write(LOOP)
    process = runner.start(*runner.command({}, line=("--", *TORCHRUN, "10000")))
    wait_for(process, "ready")
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "KeyboardInterrupt" in err


@pytest.mark.full
def test_nothing_outlives_autofit(runner: Runner) -> None:
    runner.write(LOOP)
    process = runner.start(*runner.command({}, line=("--", *TORCHRUN, "10000")))
    wait_for(process, "ready")
    assert len([pid for pid, group in groups().items() if group == process.pid]) == 3
    process.kill()
    process.communicate(timeout=60)
    assert members(process.pid) == []


@pytest.mark.full
def test_a_rank_of_another_launcher_is_not_started_again(runner: Runner) -> None:
    runner.write("torch.zeros(64 << 20) if (rank, step) == (1, 3) else None")
    autofit = runner.command({"micro_batch": "32"}, "--memory", "64MiB", line=("train.py",))
    torchrun = ("torchrun", "--nproc-per-node", "2", "--no-python")
    done = runner.run(*torchrun, *autofit)
    assert done.returncode == 1
    assert "attempt 2" not in done.stdout
    said = "another launcher has started this rank and 1 more"
    assert [line for line in ours(done.stderr) if said in line], "by the one that ran out, at least"
