"""``autofit run --address`` spreads the ranks of a plan over the hosts of a Ray cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from autofit.exceptions import UsageError
from autofit.worker.cluster.nodes import ClusterNode
from autofit.worker.cluster.rank_hosts import check
from autofit.worker.harness.ranks.group import interface

TRAIN = """\
import os, sys, time
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(int(sys.argv[1])):
    # here
    loss = nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.12f}", flush=True)
torch.save(model.state_dict(), "model.pt")
sys.exit(3)
"""
SLOW = "time.sleep(0.01)"
OF_RANK_1 = "if step == 6 and os.fstat(1).st_ino != os.stat('out').st_ino: "
"""Only rank 0 writes to the file."""
HARNESS = "harness/__main__.py"
PARTS = ("autofit", "strategies", "worker", "storage")


# --- what is refused ----------------------------------------------------------------------------


def node(name: str, *, gpus: int = 0, model: str = "", cpus: int = 1) -> ClusterNode:
    return ClusterNode(
        id=name, host=name, address="10.0.0.1", cpus=cpus, gpus=gpus, model=model, here=False
    )


@pytest.mark.quick
def test_a_cluster_with_too_few_devices_is_refused() -> None:
    own, other = node("a", gpus=2, model="H100"), node("b", gpus=8, model="H100")
    check([own, other], own, "cuda", 10)
    with pytest.raises(UsageError, match="11 ranks: the cluster has 10 x H100; plan fewer ranks"):
        check([own, other, node("c", gpus=8, model="A100")], own, "cuda", 11)
    with pytest.raises(UsageError, match="this host, c, which has no GPU: start the run on a host"):
        check([own, node("c")], node("c"), "cpu", 2)
    with pytest.raises(UsageError, match="this host, head, and Ray has no device on it"):
        check([node("head", cpus=0), node("d", cpus=8)], node("head", cpus=0), "cpu", 2)
    check([node("a", cpus=1), node("b", cpus=1)], node("a", cpus=1), "cpu", 2)
    with pytest.raises(UsageError, match="3 ranks: the cluster has 2 CPUs"):
        check([node("a", cpus=1), node("b", cpus=1)], node("a", cpus=1), "cpu", 3)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("levels", "line"),
    [
        ({"checkpointing": "all"}, ["train.py"]),
        ({}, ["--", "torchrun", "--nproc-per-node", "2", "t"]),
    ],
    ids=["no ranks", "a launcher"],
)
def test_an_address_is_for_ranks_of_a_plan(
    tmp_path: Path, levels: dict[str, str], line: list[str]
) -> None:
    (tmp_path / "train.py").write_text("pass")
    (tmp_path / "t").write_text("pass")
    (tmp_path / "plan.json").write_text(json.dumps({"plan": levels}))
    options = ["--plan", "plan.json", "--address", "127.0.0.1:1"]
    found = subprocess.run(
        [sys.executable, "-m", "autofit", "run", *options, *line],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2, found.stderr
    assert "--address 127.0.0.1:1: it spreads the ranks of a plan over hosts" in found.stderr


@pytest.mark.quick
def test_the_interface_that_leads_to_an_address_is_known() -> None:
    loopback = interface("127.0.0.1")
    assert loopback is not None
    assert loopback.startswith("lo")
    for name, found in psutil.net_if_addrs().items():
        for each in found:
            if re.fullmatch(r"[0-9.]+", each.address):
                assert interface(each.address) == name


# --- two raylets ----------------------------------------------------------------------------------


class Runs:
    """Starts the script under two ranks on the cluster."""

    def __init__(self, folder: Path, cluster: Any) -> None:
        self.folder = folder
        self.cluster = cluster
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, steps: int, here: str = "pass", **levels: str) -> subprocess.Popen[bytes]:
        """Start ``autofit run``; it writes to the files ``out`` and ``err``."""
        (self.folder / "train.py").write_text(TRAIN.replace("# here", here))
        (self.folder / "plan.json").write_text(json.dumps({"plan": {"ranks": "2", **levels}}))
        options = ["--plan", "plan.json", "--address", self.cluster.address]
        options += ["--storage", f"sqlite:///{self.folder.parent}/store.db"]
        with open(self.folder / "out", "wb") as out, open(self.folder / "err", "wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "autofit", "run", *options, "train.py", "--", str(steps)],
                cwd=self.folder,
                stdout=out,
                stderr=err,
                start_new_session=True,  # the group that a terminal would tell of Ctrl-C
            )
        self.started.append(process)
        return process

    def text(self, name: str) -> str:
        """Return what the run has written to a file."""
        return (self.folder / name).read_text()

    def wait_for_step(self, process: subprocess.Popen[bytes], step: int = 5) -> None:
        """Wait until the real run is at ``step``."""
        deadline = time.monotonic() + 100
        while f"\n{step} " not in self.text("out"):
            assert process.poll() is None, self.text("err")
            assert time.monotonic() < deadline, self.text("err")
            time.sleep(0.05)


@pytest.fixture
def runs(ray_cluster: Any, tmp_path: Path) -> Iterator[Runs]:
    """Two nodes with one CPU each; no rank is left after the test."""
    while sum(map(runs_on, ray_cluster.raylets)) < 2:
        ray_cluster.add("CPU=1")
    with in_folder(tmp_path / "job", ray_cluster) as held:
        yield held


def runs_on(pid: int) -> bool:
    """Return whether a process is alive."""
    return bool(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)


@contextmanager
def in_folder(folder: Path, cluster: Any) -> Iterator[Runs]:
    """Yield runs in a new folder; no rank is left after them."""
    folder.mkdir()
    held = Runs(folder, cluster)
    yield held
    for process in held.started:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 15
    while left := list(of_runs(folder)):
        assert time.monotonic() < deadline, [each.cmdline() for each in left]
        time.sleep(0.1)


def of_runs(folder: Path) -> Iterator[psutil.Process]:
    """Yield the ranks that have started in ``folder``."""
    for each in psutil.process_iter():
        try:
            if HARNESS in " ".join(each.cmdline()) and each.cwd() == str(folder):
                yield each
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def remote_rank(runs: Runs) -> psutil.Process:
    """Return the process of the rank that a worker of Ray has started; wait for it."""
    deadline = time.monotonic() + 100
    while not (found := remote_ranks(runs)):
        assert time.monotonic() < deadline, runs.text("err")
        time.sleep(0.05)
    return found[0]


def raylet_of(rank: psutil.Process) -> int:
    """Return the process id of the raylet whose worker has started a rank."""
    worker = rank.parent()
    assert worker is not None
    return int(worker.ppid())


def remote_ranks(runs: Runs) -> list[psutil.Process]:
    """Return the ranks of the last run that it has not started itself."""
    return [
        each
        for each in of_runs(runs.folder)
        if "ray::" in " ".join(psutil.Process(each.ppid()).cmdline())
    ]


@pytest.mark.full
def test_code_and_folder_travel_to_a_host_that_does_not_have_them(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.ray_cluster import RayCluster, far

    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    hidden = [tmp_path / "job", *(root / part for part in PARTS)]
    with RayCluster() as cluster, in_folder(tmp_path / "job", cluster) as runs:
        (runs.folder / "beside.py").write_text("WORD = 'found'\n")
        cluster.add("CPU=1")
        with far(cluster, hidden) as name:
            wait_for_nodes(cluster, 2)
            process = runs.start(8, "import beside; assert beside.WORD == 'found'")
            assert process.wait(150) == 3, runs.text("err")
            assert f"1 of 2 ranks on this host, 1 on {name}" in runs.text("err")
            assert len(runs.text("out").splitlines()) == 8


def wait_for_nodes(cluster: Any, count: int) -> None:
    """Wait until the cluster has as many nodes."""
    from autofit.worker.cluster.local_ray import RaySession
    from autofit.worker.cluster.nodes import look

    deadline = time.monotonic() + 60
    with RaySession(address=cluster.address):
        while len(look()) < count:
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.mark.full
def test_it_is_the_same_training_with_the_files_of_rank_0(runs: Runs) -> None:
    import torch

    process = runs.start(12)
    assert process.wait(150) == 3, runs.text("err")
    assert re.search("autofit: 1 of 2 ranks on this host, 1 on .", runs.text("err"))
    plain = runs.folder.parent / "plain"
    plain.mkdir()
    command = [sys.executable, str(runs.folder / "train.py"), "12"]
    alone = subprocess.run(command, cwd=plain, capture_output=True, text=True)
    assert alone.returncode == 3
    ours, theirs = (
        [float(line.split()[1]) for line in text.splitlines()]
        for text in (runs.text("out"), alone.stdout)
    )
    assert ours == pytest.approx(theirs, abs=1e-9)
    one, other = (torch.load(each / "model.pt") for each in (runs.folder, plain))
    assert all(torch.allclose(one[name], other[name], atol=1e-9) for name in one)
    expected = {"train.py", "plan.json", "model.pt", "out", "err"}
    assert {each.name for each in runs.folder.iterdir()} == expected


@pytest.mark.full
@pytest.mark.parametrize("victim", ["rank", "worker", "run", "raylet"])
def test_whoever_is_killed_all_ranks_end(runs: Runs, victim: str) -> None:
    process = runs.start(100_000, SLOW)
    runs.wait_for_step(process)
    rank = remote_rank(runs)
    pids = {
        "rank": rank.pid,
        "worker": rank.ppid(),
        "run": process.pid,
        "raylet": raylet_of(rank),
    }
    began = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    code = process.wait(60)
    assert time.monotonic() - began < 15
    said = {
        "rank": r"rank 1 failed: killed by signal 9 \(Killed\) on .",
        "worker": "rank 1 failed: .*, or Ray's worker on it, is gone",
        "run": "",
        "raylet": "rank 1 failed: .*(, or Ray's worker on it, is gone|does not answer any more)",
    }[victim]
    assert re.search(said, runs.text("err")), runs.text("err")
    assert code == {"run": -signal.SIGKILL, "raylet": 1, "worker": 1}.get(
        victim, 128 + signal.SIGKILL
    )


@pytest.mark.full
def test_a_host_that_is_lost_during_the_verification_ends_the_run(runs: Runs) -> None:
    process = runs.start(8, "time.sleep(0.3)")
    os.kill(raylet_of(remote_rank(runs)), signal.SIGKILL)
    assert process.wait(60) == 1
    assert not runs.text("out")
    assert "the verification lost a rank: rank 1: " in runs.text("err")


@pytest.mark.full
def test_a_signal_to_the_run_reaches_all_ranks(runs: Runs) -> None:
    process = runs.start(100_000, SLOW)
    runs.wait_for_step(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM, runs.text("err")


@pytest.mark.full
def test_ctrl_c_reaches_the_rank_of_the_other_host(runs: Runs) -> None:
    """The script catches it on both ranks, and ends well."""
    catches = "import signal; signal.signal(signal.SIGINT, lambda *_: sys.exit(0))"
    process = runs.start(100_000, f"{catches}; {SLOW}")
    runs.wait_for_step(process)
    rank = remote_rank(runs)
    os.killpg(process.pid, signal.SIGINT)
    rank.wait(10)
    assert process.wait(30) == 0, runs.text("err")


@pytest.mark.full
def test_an_error_of_the_other_host_is_told(runs: Runs) -> None:
    process = runs.start(20, f"{OF_RANK_1}raise ValueError('a bug of that host')")
    assert process.wait(150) == 1, runs.text("err")
    assert "ValueError: a bug of that host" in runs.text("err")  # whichever rank is heard first


@pytest.mark.full
def test_out_of_memory_on_the_other_host_falls_back(runs: Runs) -> None:
    process = runs.start(20, f"{OF_RANK_1}'AUTOFIT_ATTEMPT' in os.environ or torch.empty(1 << 50)")
    assert process.wait(200) == 3, runs.text("err")
    assert "attempt 2 starts from the beginning" in runs.text("err")
