"""Memory that really runs out on a GPU: where, whose fault, and that the next rung starts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker import meter
from autofit.worker.launch import guard as guards
from autofit.worker.launch.guard import Guard
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import (
    LaunchEnded,
    LaunchRequest,
    Learned,
    Script,
    TrialReport,
    Verdict,
)

pytestmark = pytest.mark.gpu

GIB = 1 << 30
TRAIN = """\
import sys
import time

import torch
from torch import nn

where = sys.argv[1]
GIB = 1 << 30
step = 0


class Wide(torch.autograd.Function):
    '''Needs 16 MiB for each sample, forward or backward.'''

    @staticmethod
    def forward(ctx, x):
        if where == "forward":
            x.new_empty(len(x), 4 << 20).zero_()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if where == "backward":
            gradient.new_empty(len(gradient), 4 << 20).zero_()
        return gradient


class Net(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.line = nn.Linear(size, size)

    def forward(self, x):
        if where == "workspace":  # cuBLAS asks for one in the first product of matrices
            held = []
            for size in (64 << 20, 1 << 20):
                try:
                    while True:
                        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    pass
        if where == "taken" and step == 6:
            while torch.cuda.mem_get_info()[0] > 2 * GIB:
                time.sleep(0.05)
            torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
        return Wide.apply(self.line(x))


big = where in ("to", "step")
model = Net(12800 if big else 64)
model.to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(60):
    x = torch.randn(256, 12800 if big else 64, device="cuda")
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

Launched = tuple[TrialReport, LaunchEnded]
Run = Callable[..., Launched]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Launch the script that runs out in one place, under one plan."""
    (tmp_path / "train.py").write_text(TRAIN)

    def run(where: str, budget: int, plan: Plan | None = None, **more: object) -> Launched:
        request = LaunchRequest(
            script=Script(target="train.py", args=(where,), cwd=str(tmp_path)),
            plans=(plan or Plan(),),
            device="cuda",
            budget=budget,
            timeout=120.0,
        )
        heard = []
        meanwhile = more.pop("meanwhile", None)
        for event in launch(request, **more):  # type: ignore[arg-type]
            heard.append(event)
            if isinstance(event, Learned) and event.facts.stepped and callable(meanwhile):
                meanwhile()
                meanwhile = None  # once, however often the facts are told
        *reports, ended = [e for e in heard if isinstance(e, TrialReport | LaunchEnded)]
        assert isinstance(ended, LaunchEnded)
        assert len(reports) == 1, ended.output
        assert isinstance(reports[0], TrialReport)
        return reports[0], ended

    return run


@pytest.mark.parametrize(
    ("where", "budget", "phase", "leaner", "then"),
    [
        ("forward", 3 * GIB, "forward", {"micro_batch": "auto"}, 3 * GIB),
        ("backward", 3 * GIB, "backward", {"micro_batch": "auto"}, 3 * GIB),
        ("step", int(3.4 * GIB), "optimizer step", {"optimizer": "eight_bit"}, int(3.4 * GIB)),
        ("to", GIB, "outside the model", {}, 6 * GIB),
    ],
)
def test_memory_runs_out_and_the_next_rung_starts(
    run: Run,
    free: int,
    where: str,
    budget: int,
    phase: str,
    leaner: dict[str, str],
    then: int,
) -> None:
    report, ended = run(where, budget)
    assert report.verdict is Verdict.OUT_OF_MEMORY, (report, ended.output)
    assert report.out_of_memory is not None
    assert report.out_of_memory.phase == phase
    assert (ended.taken, ended.lost) == ("", "")
    assert free - meter.free_bytes("cuda") < 64 << 20, "seen to be back before the launch ends"
    report, ended = run(where, then, Plan.of(leaner))
    assert report.verdict is Verdict.MEASURED, (report, ended.output)
    assert report.measurement is not None
    assert GIB // 4 < report.measurement.peak_device <= then


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("budget", [2 * GIB, None], ids=["under a cap", "on the whole card"])
def test_a_workspace_that_cannot_be_had(run: Run, budget: int | None) -> None:
    report, ended = run("workspace", budget or meter.hardware("cuda").total_bytes)
    assert report.verdict is Verdict.OUT_OF_MEMORY, (report, ended.output)
    assert report.out_of_memory is not None
    assert report.out_of_memory.phase == "forward"


def test_a_card_taken_in_mid_trial_is_not_held_against_the_plan(
    run: Run,
    free: int,
    hog: Callable[[int], AbstractContextManager[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guards, "BACK_SECONDS", 2.0)
    guard = Guard(meter.cards)
    size = free - 2 * GIB - (1 << 29)
    pids: list[int] = []
    with ExitStack() as others:
        report, ended = run(
            "taken",
            8 * GIB,
            guard=guard,
            meanwhile=lambda: pids.append(others.enter_context(hog(size))),
        )
        assert len(pids) == 1
        assert report.verdict is Verdict.INTERRUPTED, (report, ended.output)
        assert "another process took memory" in ended.taken
        assert ended.lost, "it is still taken: the slot is given up"
        if any(holder.size for holder in meter.cards()[0].holders):
            assert f"process {pids[0]} (" in ended.lost
    assert guard.wait(8 * GIB, seconds=10) == ""
    report, ended = run("plain", 8 * GIB, guard=guard)
    assert report.verdict is Verdict.MEASURED, (report, ended.output)
