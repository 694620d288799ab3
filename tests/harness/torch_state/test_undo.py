"""Memory runs out while a plan is taken back: nothing more is measured in that process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autofit.plan import Plan
from autofit.worker.harness.measurement.window import Window
from autofit.worker.harness.torch_state.undo import NotTakenBack, take_back
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import (
    LaunchEnded,
    LaunchRequest,
    Measurement,
    Script,
    TrialReport,
    Verdict,
)

pytestmark = pytest.mark.quick

MIB = 1 << 20
BALLAST = """\
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
HELD = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(16))
        self.large = nn.Linear(512, 16384)

    def forward(self, x):
        HELD.clear()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.large(x).square().mean()


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    if step > 3:
        HELD.append(torch.ones(165 * 2**20, dtype=torch.uint8))
    loss = model(torch.randn(2, 512))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
"""48 MiB of weights; the ballast is there only when a call begins, and a plan is taken back."""
FILL = """\
HELD = []


def fill(gradient):
    try:
        while True:
            HELD.append(torch.ones(8 * 2**20, dtype=torch.uint8))
    except RuntimeError:
        del HELD[-2:]
"""
"""When backward is nearly through, memory is full but for two such pieces, until the next call."""
MASTERS = Plan.of({"weights": "bf16_master"})


@pytest.mark.full
def test_the_plan_that_was_to_come_is_told_nothing(tmp_path: Path) -> None:
    """It would be blamed for what the one before it has left."""
    (tmp_path / "train.py").write_text(BALLAST)
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path)),
        plans=(MASTERS, Plan()),
        device="cpu",
        budget=265 * MIB,
        timeout=60,
    )
    events = list(launch(request))
    reports = [each for each in events if isinstance(each, TrialReport)]
    assert [(each.plan, each.verdict) for each in reports] == [(MASTERS, Verdict.MEASURED)]
    assert isinstance(events[-1], LaunchEnded)
    assert events[-1].stopped
    alone = [*launch(replace(request, plans=(Plan(),)))]
    (report,) = (each for each in alone if isinstance(each, TrialReport))
    assert report.verdict is Verdict.MEASURED, "and there was room for it"


def test_a_plan_that_is_applied_halfway_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    """Its small layers are split already, there is no room to split the large one."""
    script = BALLAST.replace("HELD = []\n", FILL).replace("step > 3", "False")
    hooked = "self.layers[0](x)\n        _ = x.requires_grad and x.register_hook(fill)\n"
    script = script.replace("HELD.clear()\n", f"HELD.clear()\n        x = {hooked}")
    (tmp_path / "train.py").write_text(script.replace("self.layers:", "self.layers[1:]:"))
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path)),
        plans=(Plan(), MASTERS, Plan()),
        device="cpu",
        budget=265 * MIB,
        timeout=60,
    )
    reports = [each for each in launch(request) if isinstance(each, TrialReport)]
    verdicts = [each.verdict for each in reports]
    assert verdicts == [Verdict.MEASURED, Verdict.OUT_OF_MEMORY, Verdict.MEASURED], reports[
        -1
    ].reason


@pytest.mark.full
def test_nothing_is_taken_back_for_another_size(tmp_path: Path) -> None:
    """Under the ballast there is no room for it: the chunks alone change."""
    (tmp_path / "train.py").write_text(BALLAST.replace("randn(2, 512)", "randn(16, 512)"))
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path)),
        plans=(MASTERS.replace(micro_batch="auto"),),
        device="cpu",
        budget=265 * MIB,
        timeout=60,
    )
    (report,) = [each for each in launch(request) if isinstance(each, TrialReport)]
    assert report.verdict is Verdict.MEASURED
    assert len({each.micro_batch for each in report.measurements}) > 1


def test_what_was_not_taken_back_can_be_taken_back_later() -> None:
    done: list[int] = []
    short = [True]

    def starve() -> None:
        if short:
            torch.empty(1 << 60, dtype=torch.uint8)  # which no machine has
        done.append(2)

    undos = [lambda: done.append(1), starve, lambda: done.append(3)]
    with pytest.raises(NotTakenBack):
        take_back(undos)
    assert (done, len(undos)) == ([3], 2)
    short.clear()
    take_back(undos)
    assert (done, undos) == ([3, 2, 1], [])


@pytest.mark.parametrize(("ran_out", "kept"), [("8", [2, 4]), ("4", [2]), ("2", [])])
def test_smaller_sizes_of_the_plan_itself_count(ran_out: str, kept: list[int]) -> None:
    """Not what was measured of a compiled plan before it was compiled."""
    plan, plain = Plan.of({"compile": "regional", "micro_batch": "auto"}), Plan()

    def one(of: Plan, size: int, seconds: float) -> tuple[Plan, Measurement]:
        measured = Measurement(
            micro_batch=size,
            effective_batch=8,
            step_seconds=(seconds,),
            peak_allocated=1,
            peak_reserved=1,
            peak_device=1,
        )
        return of.replace(micro_batch=str(size)), measured

    measured = [one(plain, 1, 1.0), one(plan, 4, 2.0), one(plan, 2, 3.0)]
    stage = Window(plan.replace(micro_batch=ran_out), steps=2)
    assert [each.micro_batch for _, each in stage.leaner(plan, measured)] == kept
