"""``autofit run`` over two real cards: as under ``torchrun``, and both free when one rank fails."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofit.worker import meter

pytestmark = pytest.mark.gpu

TRAIN = """\
import os
import torch
import torch.distributed as dist
from torch import nn

rank = int(os.environ["LOCAL_RANK"])
attempt = int(os.environ.get("AUTOFIT_ATTEMPT", "1"))
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
os.write(1, f"attempt {attempt} rank {rank}\\n".encode())
torch.manual_seed(0)
net = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)))
model = nn.parallel.DistributedDataParallel(net.to(device), device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    x = torch.randn(256, 512, device=device)
    output = model(x)
    if (rank, step, attempt) == (1, 3, 1):
        output.register_hook(lambda _: torch.empty(1 << 40, dtype=torch.uint8, device=device))
    optimizer.zero_grad()
    nn.functional.mse_loss(output, x).backward()
    optimizer.step()
torch.cuda.synchronize()
os.write(1, f"done {rank}\\n".encode())
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def both_cards() -> Iterator[None]:
    """Two cards, on which as much is free within seconds of the test as was before."""
    if len(meter.cards()) < 2:
        pytest.skip("needs two NVIDIA GPUs")
    before = [meter.free_bytes("cuda", index) for index in (0, 1)]
    yield
    deadline = time.monotonic() + 5
    for index, free in enumerate(before):
        while free - meter.free_bytes("cuda", index) > 64 << 20:
            assert time.monotonic() < deadline, f"memory of card {index} has not come back"
            time.sleep(0.05)


def run(folder: Path, levels: dict[str, str], *line: str) -> subprocess.CompletedProcess[str]:
    """Run a launch line under a plan."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"plan": levels}))
    autofit = [sys.executable, "-m", "autofit", "run", "--plan", str(plan), "--", *line]
    return subprocess.run(autofit, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_the_losses_are_those_under_torchrun(root: Path, tmp_path: Path, way: str) -> None:
    example = [str(root / "examples" / "decoder_lm.py"), "--parallel", way, "--steps", "10"]
    python = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    plain, tuned = tmp_path / "plain", tmp_path / "tuned"
    subprocess.run([*python, *example, "--losses", str(plain)], cwd=tmp_path, check=True)
    line = ["python", *python[1:], *example, "--losses", str(tuned)]
    done = run(tmp_path, {"checkpointing": "all"}, *line)
    assert done.returncode == 0, done.stderr
    expected = [float(loss) for loss in plain.read_text().split()]
    assert [float(loss) for loss in tuned.read_text().split()] == pytest.approx(expected, rel=1e-4)


def test_memory_that_one_rank_runs_out_of_in_backward(tmp_path: Path) -> None:
    """Rank 0 waits for it in a reduction on the card; both start again within seconds."""
    (tmp_path / "train.py").write_text(TRAIN)
    start = time.monotonic()
    done = run(tmp_path, {}, "torchrun", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 120
    ends = {f"{what} {rank}" for what in ("attempt 1 rank", "attempt 2 rank") for rank in (0, 1)}
    assert set(done.stdout.splitlines()) == ends | {"done 0", "done 1"}
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("autofit: out of")]
    assert ", backward, " in line
    assert "attempt 2 starts" in line
