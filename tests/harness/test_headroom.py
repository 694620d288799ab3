"""The batch is cut smaller when the allocator keeps retrying, before it fails.

Only a GPU's allocator has a cache to empty, so the count of its retries is made up here; all else
is real.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autofit.plan import Plan
from autofit.worker import meter
from autofit.worker.harness.real import RealRun
from autofit.worker.records import Pressed, Ran

pytestmark = pytest.mark.quick


class Reports(list[Any]):
    """Keeps what a run tells."""

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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gauge = meter.for_device("cpu")
    gauge.retries = iter([*retries, retries[-1]]).__next__  # type: ignore[method-assign]
    reports = Reports()
    run = RealRun(Plan.of({"micro_batch": "8"}), reports, gauge)  # type: ignore[arg-type]
    run.start()
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
    (ran,) = train([0, 0, 1]).of(Ran)
    assert (ran.steps, ran.retries) == (3, 1)
    assert ran.peak_device >= ran.peak_allocated
