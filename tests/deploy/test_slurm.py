"""``deploy/slurm.sh`` with stubs for Slurm's commands: two nodes, both of them this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autofit.worker.launch.reaper import SESSION, Reaper, marked, processes
from tests.ray_head import TOOLS

SRUN = """\
#!/usr/bin/env bash
# Runs a step here, and notes on which node it was to be.
while [[ $1 == --* ]]; do
    [[ $1 == --nodelist=* ]] && node=${1#--nodelist=}
    shift
done
echo "$node $1" >> "$STEPS"
exec "$@"
"""
SCONTROL = """\
#!/usr/bin/env bash
[[ $* == "show hostnames node[1-2]" ]] && printf 'node1\\nnode2\\n'
"""
SCRIPT = """
import sys, time, torch

torch.set_num_threads(1)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    loss = model(torch.randn(32, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(float(sys.argv[1]))
"""

GONE_WITHIN = 10.0
"""Seconds after the script's end in which all it has started has to be gone."""

Start = Callable[..., "subprocess.Popen[str]"]


def alive(mark: str) -> list[str]:
    """Return what runs of a session, by its command lines."""
    table = processes()
    pids = [pid for pid in marked(mark, table) if table[pid].alive]
    return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200] for pid in pids]


@pytest.fixture
def allocation(root: Path, tmp_path: Path) -> Iterator[Start]:
    """Start the script as sbatch would on the first of two nodes."""
    tools = tmp_path / "slurm"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "train.py").write_text(SCRIPT)
    mark = uuid.uuid4().hex
    job = str(int(mark[:6], 16))
    folder = Path(tempfile.gettempdir()) / f"ray-{job}"
    reaper = Reaper(mark, folder)
    environment = {
        **os.environ,
        SESSION: mark,
        "SPT_NOENV": "1",  # else the mark is overwritten
        "PATH": os.pathsep.join([str(tools), str(TOOLS), os.environ["PATH"]]),
        "STEPS": str(tmp_path / "steps"),
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "1",
        "AUTOFIT_HEAD_IP": "127.0.0.1",
    }

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = ["bash", str(root / "deploy/slurm.sh"), *arguments]
        with (tmp_path / "log").open("w") as log:
            return subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=log, stderr=log, text=True
            )

    yield start
    deadline = time.monotonic() + GONE_WITHIN
    while (left := alive(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    reaper.finish()
    shutil.rmtree(folder, ignore_errors=True)
    assert not left


@pytest.mark.full
def test_two_nodes_search_and_nothing_is_left(allocation: Start, tmp_path: Path) -> None:
    job = allocation("--only", "precision", "--trials", "1", "train.py", "--", "0")
    code = job.wait(timeout=200)
    log = (tmp_path / "log").read_text()
    assert code == 0, log
    assert "samples/s in" in log
    steps = (tmp_path / "steps").read_text().splitlines()
    assert steps == ["node1 ray", "node2 ray"]


@pytest.mark.full
def test_the_signal_before_the_end_stops_the_search_in_good_order(
    allocation: Start, tmp_path: Path
) -> None:
    job = allocation("train.py", "--", "5")
    deadline = time.monotonic() + 120
    while "study" not in (log := (tmp_path / "log").read_text()):
        assert job.poll() is None, log
        assert time.monotonic() < deadline, log
        time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) == 130
    assert "finished trials are stored" in (tmp_path / "log").read_text()
