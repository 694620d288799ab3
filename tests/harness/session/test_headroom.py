"""The batch is cut smaller when the allocator keeps retrying, before it fails.

Only a GPU's allocator has a cache to empty, so the count of its retries is made up here; all else
is real.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.analysis.pruning import UNALLOCATED
from autofit.facts import Facts
from autofit.plan import Plan
from autofit.worker import meter
from autofit.worker.harness.measurement.window import (
    RefusedAllocations,
    Step,
    Window,
    leaner_shortage,
)
from autofit.worker.harness.session.real_run import RealRun
from autofit.worker.launch.launcher import launch
from autofit.worker.meter import Peak
from autofit.worker.records.trials import (
    LaunchRequest,
    OutOfMemory,
    Pressed,
    Ran,
    Script,
    TrialReport,
    Verdict,
)
from tests.roots import a_run

pytestmark = pytest.mark.quick


class Reports(list[Any]):
    """Keeps what a run tells."""

    rank = 0

    def send(self, event: Any) -> None:
        """Keep it."""
        self.append(event)

    def of(self, kind: type) -> list[Any]:
        """Return the events of one kind."""
        return [event for event in self if isinstance(event, kind)]


def train(retries: list[int]) -> Reports:
    """Train a step for each count of retries, with 8 of 16 samples at a time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    gauge = meter.for_device("cpu")
    # One more is asked for after the first step, and at the end.
    answers = iter([retries[0], *retries, retries[-1]])
    gauge.retries = answers.__next__  # type: ignore[method-assign]
    reports = Reports()
    run = RealRun(a_run(Plan.of({"micro_batch": "8"})), reports, gauge)  # type: ignore[arg-type]
    run.start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for _ in retries:
            optimizer.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
        run.script_ended()
    finally:
        run.stop()
    return reports


def test_two_steps_on_end() -> None:
    reports = train([0, 0, 1, 1, 2, 3, 3, 3])
    assert reports.of(Pressed) == [Pressed(micro_batch=4, retries=3, steps=6)]


def test_single_retries_are_no_pressure() -> None:
    assert train([0, 1, 1, 2, 2, 3]).of(Pressed) == []


def test_as_long_as_it_goes_on() -> None:
    pressed = train(list(range(12))).of(Pressed)
    assert [each.micro_batch for each in pressed] == [4, 2, 1]


def test_the_end_tells_what_it_came_to() -> None:
    (ran,) = train([2, 2, 3]).of(Ran)
    assert (ran.steps, ran.retries) == (3, 1), "those of the first step aside"
    assert ran.peak_device >= ran.peak_allocated


TRAIN = """\
from queue import SimpleQueue

import torch
from autofit.worker import meter
from torch import nn

LARGE = SimpleQueue()  # no list: the harness would put that back, or refuse to split
type(meter.for_device("cpu")).retries = lambda self: LARGE.qsize()


class Net(nn.Linear):
    def forward(self, x):
        if len(x) >= 8:
            LARGE.put(x.shape)
        return super().forward(x)


model = Net(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(200):
    optimizer.zero_grad()
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
"""


def test_a_size_at_which_a_run_would_not_stay_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path)),
        plans=(Plan.of({"micro_batch": "8"}), Plan.of({"micro_batch": "4"}), Plan()),
        device="cpu",
        budget=1 << 30,
        timeout=60.0,
    )
    fixed, smaller, whole = [each for each in launch(request) if isinstance(each, TrialReport)]
    assert fixed.verdict is Verdict.OUT_OF_MEMORY
    assert fixed.reason.startswith("the allocator empties its cache in step after step; ")
    assert smaller.verdict is Verdict.MEASURED
    assert smaller.measurement is not None
    assert smaller.measurement.micro_batch == 4
    assert whole.verdict is Verdict.MEASURED, "there is nothing smaller to go to"


@pytest.mark.parametrize(
    ("size", "retried", "holds"),
    [
        ("8", [False, True, True, False], False),
        ("8", [True, True], False),
        ("8", [True, False, True, False], True),
        ("1", [True, True], True),
    ],
)
def test_when_a_size_holds(size: str, retried: list[bool], holds: bool) -> None:
    stage = Window(Plan.of({"micro_batch": size}), steps=len(retried))
    for each in retried:
        stage.counted.append(Step(1.0, 0.0, 0.5, each))
    figures = stage.figures(Peak(0, 0, 0), compiled=0.0, refused=0)
    measurement = stage.measurement([figures], Facts())
    gone = replace(measurement, peak_allocated=1 << 30, peak_reserved=3 << 30)
    short = stage.does_not_hold(gone, budget=1 << 60)
    assert (short is None) is holds
    if short is not None:
        found = UNALLOCATED.search(short.message)
        assert found is not None
        assert found[1] == "2.0 GiB", "another allocator may help"


DOES_WITH_LESS = """\
import torch
from torch import nn


class Net(nn.Linear):
    \"\"\"Stands for cuDNN, which takes a slower algorithm where a workspace is refused.\"\"\"

    def forward(self, x):
        if step == 1:
            try:
                torch.empty(1 << 32)
            except RuntimeError:
                pass
        return super().forward(x)


model = Net(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
"""


def test_what_was_done_without_before_the_window_counts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DOES_WITH_LESS)
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path)),
        plans=(Plan(), Plan.of({"micro_batch": "8"})),
        device="cpu",
        budget=1 << 30,
        timeout=60.0,
    )
    first, later = [each for each in launch(request) if isinstance(each, TrialReport)]
    assert first.measurement is not None
    assert first.measurement.allocations_refused == 1
    assert first.measurement.strained
    assert later.measurement is not None
    assert not later.measurement.strained


def test_what_a_proof_is_refused_is_its_own_affair() -> None:
    gauge = meter.for_device("cpu")
    refused = 3
    gauge.refused = lambda: refused  # type: ignore[method-assign]
    refusals = RefusedAllocations(gauge)
    with refusals.excluded():
        refused += 4
    refused += 1
    assert refusals.count() == 4


def test_of_two_shortages_the_smaller_size_says_more() -> None:
    small, large, whole = (
        OutOfMemory(phase="forward", message="no memory", micro_batch=size) for size in (2, 8, None)
    )
    assert leaner_shortage(None, large) is large
    assert leaner_shortage(large, small) is small
    assert leaner_shortage(small, large) is small
    assert leaner_shortage(small, whole) is whole
    again = OutOfMemory(phase="backward", message="no memory", micro_batch=2)
    assert leaner_shortage(small, again) is again
