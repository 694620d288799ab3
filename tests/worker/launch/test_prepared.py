"""A prepared process: it runs to its first call of the model, and a later request uses it."""

from __future__ import annotations

import os
import signal
import socket
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from autofit.plan import Plan
from autofit.worker.launch import capacity
from autofit.worker.launch.guard import Guard
from autofit.worker.launch.launcher import HARNESS, Control, launch
from autofit.worker.records.trials import (
    LaunchEnded,
    LaunchEvent,
    LaunchRequest,
    Script,
    TrialReport,
    Verdict,
)

SCRIPT = """\
import os
import socket
import time
{first}
import torch

torch.set_num_threads(1)
print("made", flush=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters())
for _ in range({steps}):
    loss = model(torch.randn(64, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
GUARD = Guard.of("cpu", {})
AS_IS, BF16, SGD = Plan(), Plan.of({"precision": "bf16"}), Plan.of({"optimizer": "sgd"})


class Prepared(threading.Thread):
    """A prepared launch, whose events a thread collects."""

    def __init__(self, request: LaunchRequest) -> None:
        super().__init__(daemon=True)
        self.request = request
        self.control = Control()
        self.heard: list[LaunchEvent] = []

    def run(self) -> None:
        prepared = replace(self.request, prepared=True)
        for event in launch(prepared, harness=HARNESS, control=self.control):
            self.heard.append(event)

    def process(self) -> psutil.Process:
        """Return its process, once it has started."""
        until(lambda: bool(self.control.pids))
        return psutil.Process(self.control.pids[0])

    def until_paused(self) -> psutil.Process:
        """Return its process, once that waits without computing."""
        process = self.process()

        def waits() -> bool:
            before = float(process.cpu_times().user)
            time.sleep(0.3)
            return before > 0.5 and float(process.cpu_times().user) == before

        until(waits)
        return process

    def use(self, plan: Plan = BF16, **more: float) -> TrialReport | None:
        """Use it for ``plan``; return the plan's report when the launch has ended."""
        self.control.use(replace(self.request, plans=(plan,), **more), GUARD)  # type: ignore[arg-type]
        self.join(60)
        assert isinstance(self.heard[-1], LaunchEnded)
        reports = [event for event in self.heard if isinstance(event, TrialReport)]
        assert len(reports) <= 1
        return reports[0] if reports else None


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def prepare(tmp_path: Path) -> Iterator[Callable[..., Prepared]]:
    """Start a prepared launch of a script; afterwards none of its processes is left."""
    launches: list[Prepared] = []

    def start(first: str = "", *, at_start: Plan = AS_IS, steps: int = 40) -> Prepared:
        text = SCRIPT.format(first=textwrap.dedent(first), steps=steps)
        (tmp_path / "train.py").write_text(text)
        request = LaunchRequest(
            script=Script(target="train.py", cwd=str(tmp_path)),
            plans=(at_start,),
            device="cpu",
            budget=1 << 30,
            timeout=60,
        )
        launches.append(Prepared(request))
        launches[-1].start()
        return launches[-1]

    yield start
    for each in launches:
        each.control.stop()
        each.join(30)
        assert not each.is_alive()
    assert not [p for p in psutil.process_iter() if str(HARNESS) in _line(p, tmp_path)]


def _line(process: psutil.Process, folder: Path) -> list[str]:
    try:
        return process.cmdline() if process.cwd() == str(folder) else []
    except psutil.Error:
        return []


@pytest.mark.quick
def test_it_gets_its_plan_before_the_model_meets_it(prepare: Callable[..., Prepared]) -> None:
    prepared = prepare("time.sleep(1)")
    process = prepared.until_paused()
    assert not prepared.heard or not isinstance(prepared.heard[-1], LaunchEnded)
    report = prepared.use()
    assert report is not None
    assert report.plan == BF16
    assert report.verdict is Verdict.MEASURED
    assert 0 < report.startup_seconds < 1, "what the launch still waited for"
    assert not process.is_running()
    end = prepared.heard[-1]
    assert isinstance(end, LaunchEnded)
    assert "made" in end.output
    assert end.seconds < 10


@pytest.mark.full
def test_it_can_be_used_before_it_waits(prepare: Callable[..., Prepared]) -> None:
    prepared = prepare("time.sleep(2)")
    process = prepared.process()
    report = prepared.use()
    assert report is not None
    assert report.verdict is Verdict.MEASURED
    assert report.startup_seconds > 2
    assert not process.is_running()


@pytest.mark.full
def test_killed_from_outside_it_is_silently_replaced(prepare: Callable[..., Prepared]) -> None:
    prepared = prepare()
    os.kill(prepared.until_paused().pid, signal.SIGKILL)
    until(lambda: not prepared.control.pids)
    assert prepared.heard == [] or not isinstance(prepared.heard[-1], LaunchEnded)
    report = prepared.use()
    assert report is not None
    assert report.verdict is Verdict.MEASURED
    assert report.startup_seconds > 0.5, "a process of its own"


@pytest.mark.quick
def test_that_it_fails_beside_another_process_says_nothing_of_its_script(
    prepare: Callable[..., Prepared],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        prepared = prepare(f"held = socket.create_server({address})")
        prepared.process()
        until(lambda: not prepared.control.pids)
    report = prepared.use()
    assert report is not None
    assert report.verdict is Verdict.MEASURED


@pytest.mark.full
def test_a_plan_that_needs_another_start_gets_a_process_of_its_own(
    prepare: Callable[..., Prepared],
) -> None:
    prepared = prepare()
    process = prepared.until_paused()
    report = prepared.use(SGD)
    assert report is not None
    assert (report.plan, report.verdict) == (SGD, Verdict.MEASURED)
    assert report.startup_seconds > 0.5
    assert not process.is_running()


@pytest.mark.quick
def test_a_level_of_its_start_is_kept(prepare: Callable[..., Prepared]) -> None:
    prepared = prepare(at_start=SGD)
    prepared.until_paused()
    report = prepared.use(SGD.replace(precision="bf16"))
    assert report is not None
    assert report.verdict is Verdict.MEASURED
    assert report.startup_seconds < 1


@pytest.mark.quick
def test_its_time_counts_from_its_use(prepare: Callable[..., Prepared]) -> None:
    prepared = prepare("time.sleep(1000)")
    prepared.process()
    time.sleep(1)
    started = time.monotonic()
    report = prepared.use(timeout=1.5)
    assert report is not None
    assert report.verdict is Verdict.TIMED_OUT
    assert 1.4 < time.monotonic() - started < 10


@pytest.mark.full
def test_a_script_without_a_model_is_run_again_when_it_is_used(
    prepare: Callable[..., Prepared],
) -> None:
    prepared = prepare(steps=0)
    prepared.process()
    until(lambda: not prepared.control.pids)
    assert prepared.use() is None


@pytest.mark.parametrize(
    ("change", "enough"),
    [
        ({}, True),
        ({"cores": 2, "processes": 1}, False),
        ({"processes": 8}, False),
        ({"free": 15 << 30}, False),
    ],
)
@pytest.mark.quick
def test_it_needs_cores_and_twice_its_memory(change: dict[str, int], enough: bool) -> None:
    figures = {"processes": 3, "peak": 8 << 30, "cores": 8, "free": 16 << 30, **change}
    assert capacity.Capacity(**figures).enough is enough


@pytest.mark.quick
def test_the_capacity_beside_a_process_is_measured() -> None:
    held = bytearray(64 << 20)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    found = capacity.beside([os.getpid()])
    assert found.processes >= 1
    assert found.peak >= len(held)
    assert found.free > 0
