"""A search with one slot prepares the next process beside the running one.

That is switched off for the CPU. A program of its own switches it on and runs the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from autofit.storage import Purpose, State
from autofit.worker.launch.launcher import HARNESS
from tests.tuning.finished import SLOW, Trials
from tests.tuning.test_kills import Watch

IMPORT = 4.0
"""Seconds that the script's imports take."""
PROGRAM = """\
import sys
from autofit.cli import main
from autofit.tuning import local_slots
from autofit.worker.launch import capacity

local_slots.NOT_PREPARED_ON, capacity.CORES = frozenset(), 1
sys.exit(main(["search", "train.py", "--trials", "4"]))
"""


@pytest.fixture
def search(script: Callable[..., Path]) -> Callable[[], subprocess.Popen[str]]:
    """Start a search of the tiny script with a slow import and slow steps."""
    path = script("    optimizer.step()\n", SLOW.replace("0.05", "0.2"))
    path.write_text(f"import time\n\ntime.sleep({IMPORT})\n{path.read_text()}")

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=path.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start


def running(folder: Path) -> set[psutil.Process]:
    """Return the processes that run the script."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.cmdline()[1:] == [str(HARNESS)] and process.cwd() == str(folder):
                found.add(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.full
def test_the_confirmation_uses_the_prepared_process(
    search: Callable[[], subprocess.Popen[str]], trials: Trials, tmp_path: Path
) -> None:
    process, seen = search(), set[psutil.Process]()
    while process.poll() is None:
        beside = running(tmp_path)
        assert len(beside) <= 2
        seen |= beside
        time.sleep(0.2)
    assert process.stdout is not None
    assert process.returncode == 0, process.stdout.read()
    first = trials(tmp_path)[0].report
    confirmed = next(t.report for t in trials(tmp_path) if t.purpose is Purpose.CONFIRM)
    assert first is not None
    assert confirmed is not None
    assert first.startup_seconds > IMPORT
    assert confirmed.startup_seconds < IMPORT
    assert len(seen) == len({trial.launch for trial in trials(tmp_path)}), "none was for nothing"
    assert running(tmp_path) == set()


@pytest.mark.full
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_after_an_interrupt_no_process_is_left(
    search: Callable[[], subprocess.Popen[str]],
    trials: Trials,
    tmp_path: Path,
    sent: signal.Signals,
) -> None:
    process = search()
    deadline = time.monotonic() + 90
    while len(running(tmp_path)) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline, "no process was prepared"
        time.sleep(0.1)
    watch = Watch(process.pid)
    watch.look()
    if sent is signal.SIGINT:
        os.killpg(process.pid, sent)
    else:
        process.kill()
    assert process.wait(60) == (130 if sent is signal.SIGINT else -sent)
    psutil.wait_procs(watch.seen, timeout=10)
    assert watch.left() == []
    assert running(tmp_path) == set()
    if sent is signal.SIGINT:
        assert trials(tmp_path, State.RUNNING) == ()
