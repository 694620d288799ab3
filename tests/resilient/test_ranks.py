"""One rank runs out of memory: all go on, on the same rung. Real processes, real collectives."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, os, sys, time
import torch
from torch import distributed, nn
import autofit
from autofit.exceptions import CannotRetry

wrap, phase, broken = sys.argv[1:4]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)

def full(batch_size):
    if failing and rank == 1 and batch_size > 8:
        if broken == "bug":
            raise ValueError("a bug of rank 1")
        torch.ones(1 << 26)  # 256 MiB, more than the cap

class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, batch_size):
        ctx.batch_size = batch_size
        return x.view_as(x)
    @staticmethod
    def backward(ctx, gradient):
        full(ctx.batch_size)
        return gradient, None

def sharded(model):
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

tried = []

@autofit.resilient(batch_size=16)
def train(batch_size, accumulation=1):
    tried.append(batch_size)
    torch.manual_seed(0)
    model = sharded(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: full(batch_size) if phase == "step" else None)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(3):
        x = torch.randn(16, 8, generator=data)
        optimizer.zero_grad()
        for part in x.split(batch_size):
            if phase == "forward" and step == 1:
                full(batch_size)
            hidden = model(part)
            if phase == "backward" and step == 1:
                hidden = InBackward.apply(hidden, batch_size)
            loss = hidden.pow(2).mean() / accumulation
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

distributed.init_process_group("gloo")
failing = True
said = {"rank": rank}
started = time.monotonic()
try:
    said["losses"] = train()
    said["seconds"] = time.monotonic() - started
    failing = False
    said["again"] = train()
except (CannotRetry, ValueError) as error:
    said["error"] = f"{type(error).__name__}: {error}"
said["tried"] = tried
print("SAID " + json.dumps(said))
"""


def launch(
    tmp_path: Path, size: int, *arguments: str, timeout: float = 150
) -> list[dict[str, Any]]:
    """Run the program on so many ranks and return what each says."""
    script = tmp_path / "ranks.py"
    script.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "autofit.worker.cap", "200MiB", "--", sys.executable]
    ranks = [
        subprocess.Popen(
            [*command, str(script), *arguments],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    said = []
    deadline = time.monotonic() + timeout
    try:
        for process in ranks:
            out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            assert process.returncode == 0, f"{process.returncode}\n{out}{err}"
            line = next(line for line in out.splitlines() if line.startswith("SAID "))
            said.append(json.loads(line.removeprefix("SAID ")))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return said


@pytest.mark.parametrize(
    ("size", "wrap", "phase"),
    [
        pytest.param(2, "ddp", "forward", marks=pytest.mark.full),
        pytest.param(2, "ddp", "backward", marks=pytest.mark.quick),
        pytest.param(2, "ddp", "step", marks=pytest.mark.full),
        pytest.param(2, "fsdp", "backward", marks=pytest.mark.full),
        pytest.param(4, "ddp", "forward", marks=pytest.mark.full),
        pytest.param(4, "ddp", "backward", marks=pytest.mark.full),
        pytest.param(4, "ddp", "step", marks=pytest.mark.full),
        pytest.param(4, "fsdp", "backward", marks=pytest.mark.full),
    ],
)
def test_all_ranks_go_on_together(tmp_path: Path, size: int, wrap: str, phase: str) -> None:
    said = launch(tmp_path, size, wrap, phase, "short")
    for rank in said:
        assert rank["tried"] == [16, 8, 8], rank
        assert rank["seconds"] < 60
        assert rank["losses"] == rank["again"]  # as when nothing had failed


@pytest.mark.quick
def test_a_bug_of_one_rank_is_no_reason_to_retry(tmp_path: Path) -> None:
    said = launch(tmp_path, 2, "ddp", "forward", "bug")
    assert said[1]["error"] == "ValueError: a bug of rank 1"
    assert "another rank" in said[0]["error"]
    assert [rank["tried"] for rank in said] == [[16], [16]]


@pytest.mark.full
@pytest.mark.parametrize("phase", ["forward", "step"])
def test_parameters_that_torch_still_holds_are_not_trained_twice(
    tmp_path: Path, phase: str
) -> None:
    """A rank that FSDP2 was gathering weights on keeps them: refused on all ranks, no hang."""
    said = launch(tmp_path, 2, "fsdp", phase, "short")
    for rank in said:
        assert rank["tried"] == [16]
        assert rank["error"].startswith("CannotRetry: ")
