"""Faults while a script trains: what plain Python survives, a run and a trial survive too."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import LaunchRequest, Script, TrialReport, Verdict
from tests.loops.judging import under_plan
from tests.loops.nursery import Nursery

TRAIN = """\
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
# before
for step in range(12):
    loss = net(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    # within
print("done")
"""
ENCODER = """\
import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.register_buffer("positions", torch.randn(5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x) + self.positions)).mean()


net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
LOSSES = []
for step in range(6):
    loss = net(torch.randn(4, 5, 6)).square()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    LOSSES.append(loss.item())
RESULT = {"losses": LOSSES}
"""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """What runs scripts in forks."""
    with Nursery() as running:
        yield running


def write(folder: Path, before: str = "", within: str = "") -> Path:
    path = folder / "train.py"
    inside = within.replace("\n", "\n    ")
    path.write_text(TRAIN.replace("# before", before).replace("# within", inside))
    return path


def trial(folder: Path) -> TrialReport:
    """Return what a trial of the script as it is comes to."""
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(folder)),
        plans=(Plan(),),
        device="cpu",
        budget=14 << 20,
        timeout=60,
    )
    return next(each for each in launch(request) if isinstance(each, TrialReport))


def autofit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("AUTOFIT_STORAGE", None)
    line = [sys.executable, "-m", "autofit", *arguments]
    return subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.mark.quick
def test_an_encoder_behind_a_buffer_in_half_precision_is_trained_or_refused(
    nursery: Nursery,
) -> None:
    """Its layers are called with what a float32 buffer has made of their inputs."""
    outcome = under_plan(nursery, ENCODER, Plan.of({"weights": "bf16_master"}))
    assert not outcome.detail.startswith("RuntimeError"), outcome.detail


NO_SHORTAGE = {
    "handled, then another error": (
        "if step == 1:\n"
        "    print('torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB; retrying')\n"
        "    import subprocess, sys\n"
        "    subprocess.run([sys.executable, '-c', 'raise ValueError(3)'], check=True)"
    ),
    "a bug in the handler": (
        "try:\n    raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')\n"
        "except RuntimeError:\n    {}['batch size']"
    ),
    "a cache of its own": "if step == 1:\n    raise MemoryError('my own cache is full')",
}


@pytest.mark.quick
@pytest.mark.parametrize(
    "what",
    [
        "handled, then another error",
        "a bug in the handler",
        "a cache of its own",
    ],
)
def test_a_script_that_fails_of_its_own_has_not_run_out_of_memory(
    what: str, tmp_path: Path
) -> None:
    write(tmp_path, within=NO_SHORTAGE[what])
    assert trial(tmp_path).verdict is Verdict.SCRIPT_FAILED


@pytest.mark.quick
def test_what_the_allocator_refuses_is_a_shortage(tmp_path: Path) -> None:
    write(tmp_path, within="held = torch.ones(4 << 20) if step == 2 else None")
    assert trial(tmp_path).verdict is Verdict.OUT_OF_MEMORY


@pytest.mark.quick
def test_a_script_may_close_what_it_has_not_opened(tmp_path: Path) -> None:
    """Daemons do, before anything else; the pipe of events must not be among it."""
    write(tmp_path, before="import os\nos.closerange(3, 200)")
    (tmp_path / "plan.json").write_text(json.dumps({"plan": {"micro_batch": "4"}}))
    done = autofit(tmp_path, "run", "--plan", "plan.json", "train.py")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "done" in done.stdout


class Deaf(threading.Thread):
    """Takes connections, and never says a word."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self._taken: list[socket.socket] = []

    def run(self) -> None:
        with suppress(OSError):
            while True:
                self._taken.append(self.socket.accept()[0])


@pytest.mark.full
def test_what_is_no_ray_is_said_soon(tmp_path: Path) -> None:
    write(tmp_path)
    deaf, started = Deaf(), time.monotonic()
    with closing(deaf.socket):
        deaf.start()
        done = autofit(tmp_path, "search", "train.py", "--address", deaf.address)
    assert done.returncode == 1, done.stderr
    assert "the server there is no head of Ray" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started < 30


@pytest.mark.quick
@pytest.mark.full
def test_nobody_else_reads_what_a_search_keeps(tmp_path: Path) -> None:
    """Neither its database nor, while it runs, its folder below the temporary one."""
    write(tmp_path)
    scratch = tmp_path / "t"
    scratch.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}
    environment.pop("AUTOFIT_STORAGE", None)
    line = [sys.executable, "-m", "autofit", "search", "train.py", "--trials", "1"]
    before = {*Path("/tmp").iterdir()}
    open_to_others: set[str] = set()
    with subprocess.Popen(
        line, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    ) as search:
        while search.poll() is None:
            for folder in [*scratch.iterdir(), *({*Path("/tmp").iterdir()} - before)]:
                with suppress(OSError):
                    if folder.name.startswith("autofit-") and folder.stat().st_mode & 0o077:
                        open_to_others.add(f"{folder.name[:8]} {folder.stat().st_mode:o}")
            time.sleep(0.05)
    assert search.returncode == 0
    assert open_to_others == set()
    assert not (tmp_path / "autofit.db").stat().st_mode & 0o077


SPOILT = {
    "a list": "[1, 2]",
    "no JSON": "{not json",
    "an unknown technique": '{"levitation": "all"}',
}


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a script was searched."""
    folder = tmp_path_factory.mktemp("searched")
    write(folder)
    done = autofit(folder, "search", "train.py", "--trials", "1")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.full
@pytest.mark.parametrize("content", SPOILT.values(), ids=SPOILT.keys())
def test_a_plan_that_is_none_in_the_store_is_one_line(
    content: str, searched: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(searched, folder)
    with closing(sqlite3.connect(folder / "autofit.db")) as database, database:
        database.execute("update trial set plan = ?, report = ?", (content, content))
    done = autofit(folder, "best", "train.py")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) <= 2, done.stderr
