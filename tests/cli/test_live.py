"""The table in a terminal: a console of fixed width, and a real pseudo-terminal."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable

import pytest
from rich.console import Console

from autofit.plan import Plan
from autofit.strategies import Facts
from autofit.tuning.notices import (
    FactsKnown,
    PhaseBegun,
    SizeMeasured,
    StudyStarted,
    TrialDropped,
    TrialEnded,
    TrialStarted,
)
from autofit.view.live import LiveTable, Running, running_line
from autofit.worker.records.trials import Measurement, TrialReport

pytestmark = pytest.mark.quick
OPEN = Plan.of({"checkpointing": "auto", "optimizer": "fused", "micro_batch": "auto"})
SPLIT = Plan.of({"checkpointing": "all", "micro_batch": "8"})


def test_rows_stay_and_what_runs_goes(
    opened: StudyStarted,
    facts: Facts,
    measured: Callable[[Plan, float, float], TrialReport],
) -> None:
    screen = io.StringIO()
    table = LiveTable(screen, Console(file=screen, width=100, force_terminal=True))
    with table:
        table(opened)
        table(FactsKnown(facts=facts))
        table(TrialStarted(slot=0, plan=Plan()))
        assert table.status().plain.startswith("  .. as it is: starts, ")
        report = measured(SPLIT, 18.0, 23.5)
        table(SizeMeasured(slot=0, plan=SPLIT, measurement=report.measurements[0]))
        assert "18.0 samples/s at micro 8, 23.5 of 24.0 GiB" in table.status().plain
        table(TrialEnded(number=1, slot=0, report=report, best=True))
        assert table.status().plain == ""
    assert "checkpointing, micro 8" in screen.getvalue()
    assert "\x1b[32m" in screen.getvalue()


def test_what_runs(measure: Callable[[float, float], Measurement]) -> None:
    running = Running(plan=SPLIT, since=10.0)
    line = "  .. checkpointing, micro 8: starts, 12 s"
    assert running_line(running, 22.0, 1 << 30) == line
    assert running_line(running, 22.0, 1 << 30, usual=40.0) == f"{line}, about 28 s left"
    assert running_line(running, 22.0, 1 << 30, usual=11.0) == line


def test_the_phase_and_the_steps_are_shown() -> None:
    table = LiveTable(io.StringIO())
    table(TrialStarted(slot=0, plan=OPEN))
    assert table.status().plain.startswith("  .. checkpointing, fused optimizer: starts, ")
    table(PhaseBegun(slot=0, phase="verifies"))
    table(TrialStarted(slot=0, plan=OPEN))
    assert "fused optimizer: verifies, " in table.status().plain
    for _ in range(2):
        table(PhaseBegun(slot=0, phase="measures", steps=4))
    assert "fused optimizer: measures, step 8, " in table.status().plain


def test_which_card_runs_what() -> None:
    screen = io.StringIO()
    table = LiveTable(screen, Console(file=screen, width=100))
    for slot in (0, 1):
        table(TrialStarted(slot=slot, plan=Plan(), on=f"GPU {slot + 2}"))
    first, second = table.status().plain.split("\n")
    assert first.startswith("  .. GPU 2: as it is")
    assert second.startswith("  .. GPU 3: as it is")
    table(TrialDropped(slot=0, plan=Plan()))
    assert "\n" not in table.status().plain
    assert "stopped early: as it is" in screen.getvalue()


def test_a_real_terminal_gets_the_live_table() -> None:
    code = (
        "from autofit.view.render import renderer\n"
        "from autofit.tuning.notices import Line\n"
        "with renderer(stderr=False) as show:\n"
        "    show(Line(text='hello'))\n"
        "    print(type(show).__name__)\n"
    )
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", code], stdout=theirs, env=env, check=True, timeout=60)
    os.close(theirs)
    said = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "LiveTable" in said
    assert "hello" in said


def test_a_pipe_gets_plain_lines() -> None:
    code = (
        "import sys\n"
        "from autofit.view.render import renderer\n"
        "print(type(renderer(stderr=False)).__name__, 'rich' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "PlainLines False\n"
