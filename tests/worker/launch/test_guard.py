"""Cards that others use: what a guard sees of them, and what a launch makes of it.

What the driver answers is made up here, there being no card; ``tests/gpu`` has the real one.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autofit.exceptions import WorkerError
from autofit.facts import Hardware
from autofit.plan import Plan
from autofit.worker.launch import guard as guards
from autofit.worker.launch.guard import Guard, who
from autofit.worker.launch.launcher import launch
from autofit.worker.meter import Card, CardHolder
from autofit.worker.records.trials import LaunchEnded, LaunchRequest, Script, TrialReport, Verdict

pytestmark = pytest.mark.quick

GIB = 1 << 30


@dataclass
class Machine:
    """A card of 80 GiB, and who holds what on it."""

    holders: list[CardHolder] = field(default_factory=list)
    unnamed: int = 0
    answers: bool = True

    def cards(self) -> tuple[Card, ...]:
        if not self.answers:
            raise WorkerError("the NVIDIA driver does not answer: Unknown Error")
        held = self.unnamed + sum(holder.size or 0 for holder in self.holders)
        hardware = Hardware(device="cuda", name="A card", total_bytes=80 * GIB)
        return (
            Card(
                entry="3",
                uuid="GPU-3",
                hardware=hardware,
                free=80 * GIB - held,
                held=held,
                holders=tuple(self.holders),
            ),
        )

    def take(self, gib: int, pid: int = 4711) -> None:
        self.holders.append(CardHolder(pid=pid, name="python", size=gib * GIB))


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_who_holds_what_is_named_as_far_as_the_driver_says(machine: Machine) -> None:
    assert who(machine.cards()[0]) == ""
    machine.take(50)
    machine.take(10, pid=4712)
    assert who(machine.cards()[0]) == (
        ": process 4711 (python) holds 50.0 GiB, process 4712 (python) holds 10.0 GiB"
    )
    assert who(machine.cards()[0], but=[4711]) == ": process 4712 (python) holds 10.0 GiB"
    machine.unnamed = 5 * GIB
    assert who(machine.cards()[0], but=[4711]).endswith("10.0 GiB, others hold 5.0 GiB")
    machine.holders = [CardHolder(pid=9, name="", size=None)]
    assert who(machine.cards()[0]) == (
        ": processes that the driver does not name here hold 5.0 GiB"
    )


def test_what_others_held_at_first_is_not_held_against_the_card(machine: Machine) -> None:
    machine.take(60)
    guard = Guard(machine.cards)
    assert guard.wait(80 * GIB) == ""
    assert not guard.taken(20 * GIB, 80 * GIB)
    assert guard.taken(19 * GIB, 80 * GIB)
    assert not guard.taken(19 * GIB, 10 * GIB), "there is room enough for this budget"
    machine.take(5, pid=4712)
    assert not guard.taken(15 * GIB, 80 * GIB, beside=[4712]), "a process of the launch's own"


def test_memory_that_does_not_come_back_is_told_with_its_holder(machine: Machine) -> None:
    guard = Guard(machine.cards)
    machine.take(70)
    started = time.monotonic()
    lost = guard.wait(24 * GIB, seconds=0.3)
    assert 0.3 <= time.monotonic() - started < 3
    assert lost == "GPU 3 has 10.0 GiB free: process 4711 (python) holds 70.0 GiB"
    assert guard.wait(10 * GIB, seconds=0) == ""


def test_where_the_driver_is_silent_nothing_is_guarded(machine: Machine) -> None:
    machine.answers = False
    guard = Guard(machine.cards)
    assert guard.wait(24 * GIB) == ""
    assert not guard.taken(0, 24 * GIB)
    assert Guard.of("cpu", {}).wait(24 * GIB) == ""


# --- in a launch ------------------------------------------------------------------------------

PRELUDE = """
import os, sys
from multiprocessing.connection import Connection
from autofit.worker.launch import lifeline
from autofit.worker.records.trials import *

events = Connection(int(os.environ["AUTOFIT_EVENTS_FD"]), readable=False)
control = Connection(int(os.environ["AUTOFIT_CONTROL_FD"]), writable=False)
request = control.recv().request
lifeline.watch(control.fileno())
"""
RAISED = """
events.send(Raised(index=0, kind="oom", message="CUDA out of memory", traceback="", room={room}))
sys.exit(1)
"""
SHORT = """
import time
short = OutOfMemory(phase="forward", message="CUDA out of memory", room={room})
events.send(Shortage(index=0, out_of_memory=short))
time.sleep(60)
"""

Launched = tuple[list[TrialReport], LaunchEnded]


@pytest.fixture
def run(tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(guards, "BACK_SECONDS", 0.3)
    guard = Guard(machine.cards)

    def run(body: str, meanwhile: int = 0) -> Launched:
        harness = tmp_path / "harness.py"
        harness.write_text(PRELUDE + textwrap.dedent(body))
        request = LaunchRequest(
            script=Script(target="train.py", cwd=str(tmp_path)),
            plans=(Plan.of({"precision": "bf16"}),),
            device="cpu",
            budget=24 * GIB,
            timeout=30.0,
        )
        launched = launch(request, harness=harness, guard=guard)
        if meanwhile:
            machine.take(meanwhile)
        *heard, ended = list(launched)
        assert isinstance(ended, LaunchEnded)
        return [event for event in heard if isinstance(event, TrialReport)], ended

    return run


@pytest.mark.parametrize("body", [RAISED, SHORT])
def test_memory_that_others_took_is_not_held_against_the_plan(
    run: Callable[..., Launched], body: str
) -> None:
    (report,), ended = run(body.format(room=10 * GIB))
    assert report.verdict is Verdict.INTERRUPTED
    assert ended.taken == report.reason
    assert "GPU 3: another process took memory" in report.reason
    assert ended.lost == "", "it is free again"
    assert ended.seconds < 20


def test_the_plans_own_shortage_stays_its_own(run: Callable[..., Launched]) -> None:
    (report,), ended = run(RAISED.format(room=30 * GIB))
    assert report.verdict is Verdict.OUT_OF_MEMORY
    assert report.out_of_memory is not None
    assert report.out_of_memory.room == 30 * GIB
    assert (ended.taken, ended.lost) == ("", "")


def test_a_slot_whose_card_stays_taken_is_lost(run: Callable[..., Launched]) -> None:
    reports, ended = run(RAISED.format(room=None), meanwhile=70)
    assert reports == []
    assert "process 4711 (python) holds 70.0 GiB" in ended.lost
    assert ended.output == "", "nothing was started on it"
