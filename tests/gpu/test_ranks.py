"""Two ranks on two cards: one truth of both, and both cards free when one of them runs out."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker import meter
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import (
    LaunchEnded,
    LaunchRequest,
    Script,
    Shortage,
    TrialReport,
    Verdict,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(len(meter.cards()) < 2, reason="needs two GPUs"),
]

MIB, GIB = 1 << 20, 1 << 30
TRAIN = """\
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

amiss = sys.argv[1] if len(sys.argv) > 1 else ""
rank = int(os.environ["LOCAL_RANK"])
if "unset" not in amiss:
    torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
dist.init_process_group("nccl", device_id=device)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(256, 4096)
        self.down = nn.Linear(4096, 256)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Hungry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        torch.empty(8 << 30, dtype=torch.uint8, device=cotangent.device)
        return cotangent


torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(8)), nn.Linear(256, 1)).to(device)
root = DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.AdamW(root.parameters(), lr=1e-3)
held = torch.empty(512 << 20, dtype=torch.uint8, device=device) if rank and amiss else None
for step in range(400):
    x = torch.randn(4096, 256, device=device)
    if rank == 1 and step == 5:
        if "hungry" in amiss:
            x = Hungry.apply(x.requires_grad_())
        if "bug" in amiss:
            raise ValueError("a bug of rank 1 alone")
    loss = nn.functional.mse_loss(root(x), x.detach().mean(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


def heard(folder: Path, *plans: Plan, amiss: str = "") -> tuple[list[TrialReport], LaunchEnded]:
    """Run a trial on both cards; return its reports, and how it ended."""
    (folder / "train.py").write_text(TRAIN)
    request = LaunchRequest(
        script=Script(target="train.py", args=(amiss,), cwd=str(folder)),
        plans=plans,
        device="cuda",
        budget=6 * GIB,
        timeout=120,
        ranks=2,
    )
    events = list(launch(request))
    assert isinstance(events[-1], LaunchEnded)
    assert not events[-1].lost
    return [each for each in events if isinstance(each, TrialReport)], events[-1]


def assert_free(before: list[int]) -> None:
    """Both cards have what they had, within seconds, as NVML sees it."""
    deadline = time.monotonic() + 5
    while any(was - card.free > 64 * MIB for was, card in zip(before, meter.cards(), strict=True)):
        assert time.monotonic() < deadline, [card.free for card in meter.cards()]
        time.sleep(0.05)


@pytest.mark.parametrize("amiss", ["larger", "larger unset"])
def test_each_rank_measures_its_own_card(tmp_path: Path, amiss: str) -> None:
    plans = (Plan(), Plan.of({"micro_batch": "1024", "checkpointing": "all"}))
    before = [card.free for card in meter.cards()]
    found, _ = heard(tmp_path, *plans, amiss=amiss)
    assert [(report.verdict, report.reason) for report in found] == [(Verdict.MEASURED, "")] * 2
    for report in found:
        assert report.measurement is not None
        first, second = report.measurement.rank_peaks
        assert report.measurement.peak_device == max(first, second)
        assert 256 * MIB < second - first < 1024 * MIB
        assert report.measurement.effective_batch == 8192
    assert_free(before)


def test_only_one_rank_runs_out_in_backward(tmp_path: Path) -> None:
    before = [card.free for card in meter.cards()]
    events: list[tuple[float, object]] = []
    (tmp_path / "train.py").write_text(TRAIN)
    request = LaunchRequest(
        script=Script(target="train.py", args=("hungry",), cwd=str(tmp_path)),
        plans=(Plan(),),
        device="cuda",
        budget=6 * GIB,
        timeout=300,
        ranks=2,
    )
    for event in launch(request):
        events.append((time.monotonic(), event))
    ((short, _),) = [(at, event) for at, event in events if isinstance(event, Shortage)]
    ((judged, report),) = [(at, e) for at, e in events if isinstance(e, TrialReport)]
    assert report.verdict is Verdict.OUT_OF_MEMORY
    assert report.out_of_memory is not None
    assert report.out_of_memory.phase == "backward"
    assert report.reason.startswith("rank 1: ")
    assert judged - short < 30
    assert_free(before)


def test_a_bug_on_one_rank(tmp_path: Path) -> None:
    before = [card.free for card in meter.cards()]
    (report,), ended = heard(tmp_path, Plan(), amiss="bug")
    assert report.verdict is Verdict.SCRIPT_FAILED
    assert report.reason == "rank 1: ValueError: a bug of rank 1 alone"
    assert ended.seconds < 90
    assert_free(before)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_the_decoder_is_searched(root: Path, tmp_path: Path, parallel: str) -> None:
    script = str(root / "examples" / "decoder_lm.py")
    command = ["-m", "autofit", "search", script, "--gpus", "2", "--gpus-per-trial", "2"]
    options = ["--memory", "4GiB", "--trials", "4", "--without", "compile", "--json"]
    done = subprocess.run(
        [sys.executable, *command, *options, "--", "--parallel", parallel, "--steps", "400"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["rank_peak_bytes"]) == 2
    assert found["peak_bytes"] == max(found["rank_peak_bytes"])
