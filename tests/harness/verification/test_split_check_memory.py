"""A split is proven where memory has room for one sample only."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import CHECK, LaunchRequest, Script, TrialReport, Verdict

pytestmark = pytest.mark.quick

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(24))
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))  # keeps 2 MiB a sample
        return self.head(x)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    x = torch.randn(6, 4096, 64)
    loss = (model(x) - x.mean(-1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def reported(folder: Path, script: str, levels: dict[str, str], mebibytes: int) -> TrialReport:
    """Return what a trial of one plan says within a budget."""
    (folder / "train.py").write_text(script)
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(folder)),
        plans=(Plan.of(levels),),
        device="cpu",
        budget=mebibytes << 20,
        timeout=60.0,
    )
    (report,) = [event for event in launch(request) if isinstance(event, TrialReport)]
    return report


@pytest.mark.parametrize("mebibytes", [70, pytest.param(400, marks=pytest.mark.full)])
def test_what_autograd_saves_may_wait_on_the_host(tmp_path: Path, mebibytes: int) -> None:
    """Two samples are the fewest that can be split, and two do not fit in the smaller budget."""
    report = reported(tmp_path, SCRIPT, {"micro_batch": "1"}, mebibytes)
    assert (report.verdict, report.reason) == (Verdict.MEASURED, "")
    assert report.measurement is not None
    assert report.measurement.peak_device > 48 << 20


CANCELS = """
import sys


def of(tensor):
    raise AssertionError("a tensor is saved on the host")


sys.modules["autofit.worker.harness.torch_state.host_saved"]._Hosted.of = of


class Loss(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        loss = (self.net(x) - x.mean(-1, keepdim=True)).square().mean()
        return loss + 256.0 - 256.0  # rounds, so that float32 leaves a doubt


"""


def test_float64_never_saves_tensors_on_the_host(tmp_path: Path) -> None:
    """A large model would copy for minutes. The coefficients of the chunks decide instead."""
    script = SCRIPT.replace("model = Net()", CANCELS + "model = Loss(Net())")
    script = script.replace("(model(x) - x.mean(-1, keepdim=True)).square().mean()", "model(x)")
    report = reported(tmp_path, script, {"micro_batch": "1"}, 190)
    assert (report.verdict, report.reason) == (Verdict.MEASURED, "")


TABLED = """
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(3 << 14, 64))  # 12 MiB
        self.register_buffer("calls", torch.zeros(()))
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x):
        self.calls += 1
        x = x + self.table[: x.shape[1]]
        return self.two(torch.tanh(self.one(x)))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    x = torch.randn(6, 1024, 64)
    loss = (model(x) - x.mean(-1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("levels", [{"micro_batch": "1"}, {"precision": "bf16"}])
def test_a_large_buffer_needs_no_second_copy(tmp_path: Path, levels: dict[str, str]) -> None:
    report = reported(tmp_path, TABLED, levels, 23)
    assert (report.verdict, report.reason) == (Verdict.MEASURED, "")


BLOCKS = """
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Net()
"""


def test_blocks_that_can_run_again_do_before_the_host_is_asked(tmp_path: Path) -> None:
    loop = SCRIPT.partition("model = Net()\n")[2]
    forbidden = """
import torch
from autofit.worker.harness.torch_state import host_saved as hosted


def of(tensor):
    raise AssertionError("it went to the host")


hosted._Hosted.of = of
"""
    report = reported(tmp_path, forbidden + BLOCKS + loop, {"micro_batch": "1"}, 70)
    assert (report.verdict, report.reason) == (Verdict.MEASURED, "")


SPENT = """
import os


def forward(self, x, plain=Net.forward):
    if len(x) == 4 and not torch.is_grad_enabled():
        os._exit(4)
    return plain(self, x)


Net.forward = forward
model = Net()
"""


@pytest.mark.full
def test_where_there_is_no_room_nothing_else_is_spent(tmp_path: Path) -> None:
    """Backward of four samples is what does not fit: their other runs do not come before."""
    script = SCRIPT.replace("model = Net()", SPENT)
    report = reported(tmp_path, script, {"micro_batch": "1"}, 85)
    assert (report.verdict, report.reason) == (Verdict.MEASURED, "")
    report = reported(tmp_path, script, {"micro_batch": "1"}, 400)
    assert report.verdict is not Verdict.MEASURED, "where there is room, four samples are looked at"


WIDE = """
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(32, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        q = self.query(x)
        scores = torch.bmm(q, x.transpose(1, 2))  # 16 MiB a sample, 8 in bf16
        return self.head(torch.bmm(torch.sigmoid(scores), x) / 2048)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    x = torch.randn(6, 2048, 32)
    loss = (model(x) - x.mean(-1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("precision", "verdict"),
    [
        pytest.param("bf16", Verdict.MEASURED, marks=pytest.mark.full),
        ("as_is", Verdict.OUT_OF_MEMORY),
    ],
)
def test_in_the_precision_of_the_plan(tmp_path: Path, precision: str, verdict: Verdict) -> None:
    """Two samples do not fit in the script's own, however little is kept of them."""
    report = reported(tmp_path, WIDE, {"micro_batch": "1", "precision": precision}, 66)
    assert report.verdict is verdict, report
    if report.out_of_memory is not None:
        assert report.out_of_memory.phase == CHECK
