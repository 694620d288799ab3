"""Seconds by phase: of one process, and of a launch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker.launch.launcher import launch
from autofit.worker.records.phases import (
    CHECK,
    COMPILE,
    CONFIRM,
    DATA,
    FIRST_BATCH,
    IMPORT,
    OBSERVE,
    OTHER,
    START,
    Phases,
    added,
    filled,
    process_start,
    total,
    without,
)
from autofit.worker.records.trials import LaunchEnded, LaunchRequest, Script, TrialReport

pytestmark = pytest.mark.quick

NAP = 0.05
SLACK = 0.04
"""Seconds by which a busy machine may oversleep."""


def near(seconds: float) -> object:
    return pytest.approx(seconds + SLACK / 2, abs=SLACK / 2)


def test_a_second_counts_for_the_innermost_phase_only() -> None:
    began = time.monotonic()
    phases = Phases(began, IMPORT)
    time.sleep(NAP)
    with phases.within(CHECK):
        time.sleep(2 * NAP)
        with phases.within(DATA):
            time.sleep(3 * NAP)
    time.sleep(NAP)
    found = phases.seconds()
    whole = time.monotonic() - began
    assert found == {IMPORT: near(2 * NAP), CHECK: near(2 * NAP), DATA: near(3 * NAP)}
    assert sum(found.values()) == pytest.approx(whole, abs=0.01)


def test_a_base_phase_follows_another_once() -> None:
    phases = Phases(phase=IMPORT)
    phases.enter(FIRST_BATCH, after=IMPORT)
    phases.enter(CONFIRM)
    phases.enter(FIRST_BATCH, after=IMPORT)
    assert phases.base == CONFIRM


def test_a_base_phase_may_begin_within_another_phase() -> None:
    phases = Phases(phase=IMPORT)
    with phases.within(CHECK):
        phases.enter(OBSERVE)
        time.sleep(NAP)
    time.sleep(NAP)
    assert phases.seconds() == {IMPORT: near(0), CHECK: near(NAP), OBSERVE: near(NAP)}


def test_the_wait_for_the_first_batch_has_a_phase_of_its_own() -> None:
    phases = Phases(phase=FIRST_BATCH)
    with phases.within(DATA):
        time.sleep(NAP)
    assert phases.seconds() == {FIRST_BATCH: near(NAP)}


def test_an_error_leaves_its_phase() -> None:
    phases = Phases(phase=CONFIRM)
    with pytest.raises(ValueError, match="it"), phases.within(CHECK):
        raise ValueError("it")
    time.sleep(NAP)
    assert phases.seconds()[CONFIRM] == near(NAP)


def test_moved_seconds_are_at_most_those_of_their_source() -> None:
    phases = Phases(phase=CONFIRM)
    time.sleep(NAP)
    with phases.within(CHECK):
        time.sleep(NAP)
        phases.compiled(NAP / 2)
        phases.compiled(NAP / 2)
    phases.move(100.0, CHECK, OTHER)
    found = phases.seconds()
    assert found[COMPILE] == NAP / 2
    assert found[CHECK] == 0.0
    assert found[OTHER] == near(NAP / 2)
    assert found[CONFIRM] == near(NAP)


def test_each_plan_takes_the_seconds_since_the_one_before() -> None:
    phases = Phases(phase=IMPORT)
    time.sleep(NAP)
    first = phases.take()
    phases.enter(CONFIRM)
    time.sleep(NAP)
    second = phases.take()
    assert dict(first) == {IMPORT: near(NAP)}
    assert dict(second)[CONFIRM] == near(NAP)
    assert dict(added(first, second)) == pytest.approx(dict(phases.seconds()), abs=0.01)
    phases.restart(time.monotonic() - NAP)
    assert phases.take() == ((CONFIRM, near(NAP)),)


def test_other_threads_are_not_measured() -> None:
    phases = Phases(phase=CONFIRM)

    def elsewhere() -> None:
        phases.enter(OTHER)
        with phases.within(CHECK):
            time.sleep(NAP)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert phases.seconds() == {CONFIRM: near(NAP)}


def test_a_process_knows_when_it_started() -> None:
    now = time.monotonic()
    assert now - 24 * 3600 < process_start() <= now
    assert process_start() == pytest.approx(process_start(), abs=0.01)


def test_sums_and_differences() -> None:
    one, other = ((START, 1.0), (OTHER, 2.0)), ((CHECK, 3.0), (OTHER, 1.0))
    assert added(one, other) == ((START, 1.0), (CHECK, 3.0), (OTHER, 3.0))
    assert without(added(one, other), other) == one
    assert filled(one, 5.0) == ((START, 1.0), (OTHER, 4.0))
    assert filled(one, 1.0) == one
    assert total(one) == 3.0


SCRIPT = """
import time

import torch
from torch import nn

time.sleep({imports})
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
time.sleep({first})
for _ in range(200):
    optimizer.zero_grad()
    model(torch.randn(8, 8)).square().mean().backward()
    time.sleep(0.02)
    optimizer.step()
"""


@pytest.fixture
def request_for(tmp_path: Path) -> Callable[..., LaunchRequest]:
    def make(text: str, *plans: Plan) -> LaunchRequest:
        (tmp_path / "train.py").write_text(text)
        return LaunchRequest(
            script=Script(target="train.py", cwd=str(tmp_path)),
            plans=plans,
            device="cpu",
            budget=8 << 30,
            timeout=60,
        )

    return make


def test_the_phases_of_all_trials_are_those_of_their_launch(
    request_for: Callable[..., LaunchRequest],
) -> None:
    fused = Plan.of({"optimizer": "fused"})
    request = request_for(SCRIPT.format(imports=1.0, first=0.5), Plan(), fused)
    *events, ended = launch(request)
    assert isinstance(ended, LaunchEnded)
    first, second = (each for each in events if isinstance(each, TrialReport))
    assert total(ended.seconds_by_phase) == pytest.approx(ended.seconds, rel=0.01)
    of_trials = added(first.seconds_by_phase, second.seconds_by_phase)
    assert total(of_trials) == pytest.approx(ended.seconds, rel=0.1, abs=0.3)
    began, then = dict(first.seconds_by_phase), dict(second.seconds_by_phase)
    assert began[IMPORT] > 1.0
    assert began[FIRST_BATCH] == pytest.approx(0.6, abs=0.1)
    assert began[OBSERVE] > 0.1
    assert then[CONFIRM] > 0.1
    assert not {START, IMPORT, FIRST_BATCH, OBSERVE} & {p for p, s in then.items() if s > 0.01}


def test_a_killed_process_has_its_seconds_until_its_plan_began(
    request_for: Callable[..., LaunchRequest],
) -> None:
    broken = SCRIPT.replace("    optimizer.step()", "    import os; os.kill(os.getpid(), 9)")
    *_, report, ended = launch(request_for(broken.format(imports=0.5, first=0), Plan()))
    assert isinstance(report, TrialReport)
    assert isinstance(ended, LaunchEnded)
    assert dict(report.seconds_by_phase)[IMPORT] > 0.5
    assert total(report.seconds_by_phase) == pytest.approx(ended.seconds, rel=0.1)
