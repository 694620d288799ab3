"""kill -9 and Ctrl-C of a search, at any moment: nothing is lost, repeated, or left running."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from autofit.cli import main
from autofit.plan import Plan
from autofit.storage import Purpose, State, Store, TrialRecord
from autofit.tuning.controller import search
from autofit.tuning.notices import Line, Notice, Remeasuring, SizeMeasured, TrialStarted
from autofit.tuning.options import SearchOptions
from autofit.worker.launch.launcher import HARNESS
from autofit.worker.launch.reaper import SESSION
from autofit.worker.records.trials import Script, Verdict
from tests.tuning.finished import SLOW, Trials, check_nothing_lost, finished

GONE_WITHIN = 10.0
"""Seconds after a kill in which every process of ours has to be gone."""
MARK = re.compile(rb"(?:^|\0)" + SESSION.encode() + rb"=([0-9a-f]+)")


def session_of(process: psutil.Process) -> str | None:
    """The session a process was started in, by its environment."""
    try:
        found = MARK.search(Path(f"/proc/{process.pid}/environ").read_bytes())
    except OSError:
        return None
    return found[1].decode() if found else None


class Watch(threading.Thread):
    """Samples what a search starts, and where it listens, until stopped."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self._done = threading.Event()
        self.sessions: set[str] = set()
        self.seen: set[psutil.Process] = set()
        self.listening: set[tuple[str, str]] = set()
        """``(process, address)`` of every socket seen listening."""

    def run(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while not self._done.wait(0.4):
                self.look()

    def look(self) -> None:
        """Sample once."""
        self.seen |= {*self._root.children(recursive=True), *self._marked()}
        for process in [self._root, *self.seen]:
            self.sessions |= {session_of(process) or ""} - {""}
            self._listen(process)

    def _listen(self, process: psutil.Process) -> None:
        try:
            for connection in process.net_connections():
                if connection.status == psutil.CONN_LISTEN:
                    self.listening.add((process.name(), connection.laddr.ip))
        except psutil.Error:
            return

    def stop(self) -> None:
        self._done.set()
        self.join()

    def left(self) -> list[psutil.Process]:
        """What still runs of all that was seen or carries the mark of a session seen."""
        return [p for p in self.seen | self._marked() if _alive(p)]

    def _marked(self) -> set[psutil.Process]:
        return {p for p in psutil.process_iter() if session_of(p) in self.sessions}


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def beyond_loopback(listening: set[tuple[str, str]]) -> list[tuple[str, str]]:
    found = []
    for name, ip in listening:
        address = ipaddress.ip_address(ip)
        plain = getattr(address, "ipv4_mapped", None) or address
        if not plain.is_loopback:
            found.append((name, ip))
    return found


@contextmanager
def searching(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Watch]]:
    """A search that is being watched; afterwards nothing of it may be left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "autofit", "search", "train.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    watch = Watch(process.pid)
    watch.start()
    try:
        yield process, watch
    finally:
        process.kill()
        ended = time.monotonic()
        process.wait()
        watch.stop()
        while left := watch.left():
            told = [" ".join(each.cmdline())[:80] for each in left if _alive(each)]
            assert time.monotonic() - ended < GONE_WITHIN, told
            time.sleep(0.1)
        assert beyond_loopback(watch.listening) == []


def kill_again_and_again(folder: Path, trials: Trials, kills: int) -> None:
    """Kill searches of one study at random moments, then let one come to its end."""
    chance = random.Random(kills)
    known: tuple[TrialRecord, ...] = ()
    listening: set[tuple[str, str]] = set()
    for _ in range(kills):
        with searching(folder) as (process, watch):
            try:
                process.wait(timeout=chance.uniform(1, 14))
            except subprocess.TimeoutExpired:
                process.kill()
        listening |= watch.listening
        found = finished(folder, trials)
        check_nothing_lost(known, found)
        known = found
    with searching(folder) as (process, watch):
        printed, _ = process.communicate(timeout=200)
        assert process.returncode == 0, printed
    assert {"raylet", "gcs_server"} <= {name for name, _ in listening | watch.listening}
    found = finished(folder, trials)
    check_nothing_lost(known, found)
    with searching(folder) as (process, watch):
        process.communicate(timeout=200)
        assert process.returncode == 0
    assert finished(folder, trials) == found, "nothing was left to try"
    assert found[-1].purpose is Purpose.CONFIRM
    assert trials(folder, State.RUNNING) == ()
    with Store(str(folder / "autofit.db")) as store:
        assert len(store.studies()) == 1
    check_optuna_knows(folder, found)


def check_optuna_knows(folder: Path, found: tuple[TrialRecord, ...]) -> None:
    """Optuna's tables hold each finished trial of the search once."""
    import optuna

    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'autofit.db'}")
    (name,) = optuna.get_all_study_names(storage)
    told = optuna.load_study(study_name=name, storage=storage).get_trials()
    ours = [trial.id for trial in found if trial.purpose is Purpose.SEARCH]
    assert [trial.user_attrs["autofit_trial"] for trial in told] == ours


@pytest.mark.quick
@pytest.mark.full
def test_killed_twice_a_search_carries_on(script: Callable[..., Path], trials: Trials) -> None:
    kill_again_and_again(script().parent, trials, 2)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_killed_ten_times_a_search_carries_on(script: Callable[..., Path], trials: Trials) -> None:
    kill_again_and_again(script("    optimizer.step()\n", SLOW).parent, trials, 10)


def _ctrl_c(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to the whole group


def _terminate(process: subprocess.Popen[str]) -> None:
    process.terminate()  # as a batch system does it


@pytest.mark.quick
@pytest.mark.parametrize("stop", [_ctrl_c, pytest.param(_terminate, marks=pytest.mark.full)])
def test_interrupted_is_130_and_the_search_can_go_on(
    stop: Callable[[subprocess.Popen[str]], None], script: Callable[..., Path], trials: Trials
) -> None:
    folder = script("    optimizer.step()\n", SLOW.replace("0.05", "0.3")).parent
    with searching(folder) as (process, watch):
        deadline = time.monotonic() + 60
        while not watch.sessions or not any("harness" in " ".join(_line(p)) for p in [*watch.seen]):
            assert time.monotonic() < deadline, "no launch was seen"
            time.sleep(0.1)
        stop(process)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    last = printed.splitlines()[-1]
    assert last == (
        "autofit: interrupted: finished trials are stored; run the same command again to continue"
    )
    assert "Traceback" not in printed
    assert {trial.state for trial in trials(folder, None)} <= {State.FINISHED}


def _line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


class Killer:
    """A listener that kills the process of each plan once, as soon as it runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._again = False
        self.killed: set[tuple[Plan, bool]] = set()
        """With whether it was in the confirmation."""
        self.lines: list[str] = []
        self._threads: list[threading.Thread] = []

    def __call__(self, notice: Notice) -> None:
        match notice:
            case Line(text=text):
                self.lines.append(text)
            case Remeasuring():
                self._again = True
            case TrialStarted(plan=plan) if plan.neutral or self._again:
                self._kill(plan, wait=True)
            case SizeMeasured(plan=plan):
                self._kill(plan, wait=False)

    def _kill(self, plan: Plan, *, wait: bool) -> None:
        if (plan, self._again) in self.killed:
            return
        self.killed.add((plan, self._again))
        if not wait:
            self._strike()
            return
        self._threads.append(threading.Thread(target=self._strike))
        self._threads[-1].start()

    def _strike(self) -> None:
        """Kill what runs the script; wait until something does."""
        deadline = time.monotonic() + 30
        while not (found := [*self._running()]) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in found:
            process.kill()

    def _running(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:] == [str(HARNESS)] and process.cwd() == str(self._folder):
                    yield process

    def end(self) -> None:
        for thread in self._threads:
            thread.join()


@pytest.mark.full
@pytest.mark.usefixtures("ray_host")
def test_a_plan_whose_process_is_killed_from_outside_is_run_once_more(
    script: Callable[..., Path], trials: Trials, budget: int
) -> None:
    """As it is, in the search and in the confirmation: nothing is blamed, the winner stays."""
    path = script("    optimizer.step()\n", SLOW)
    killer = Killer(path.parent)
    options = SearchOptions(
        script=Script(target=path.name, cwd=str(path.parent)),
        storage=str(path.parent / "autofit.db"),
        memory=budget,
        only=frozenset({"micro_batch"}),
    )
    result = search(options, killer)
    killer.end()
    auto = Plan.of({"micro_batch": "auto"})
    assert {(Plan(), False), (auto, False), (result.plan, True)} <= killer.killed
    assert len([line for line in killer.lines if "It is run once more" in line]) == 3
    found = [(str(trial.plan), trial.verdict) for trial in trials(path.parent)]
    assert found == [
        ("as it is", Verdict.OUT_OF_MEMORY),
        (str(auto), Verdict.MEASURED),
        (str(result.plan), Verdict.MEASURED),
    ]
    with Store(str(path.parent / "autofit.db")) as store:
        assert store.studies()[0].left_out == ()


@pytest.mark.full
@pytest.mark.usefixtures("ray_host")
def test_a_plan_that_is_killed_twice_is_blamed(
    script: Callable[..., Path], trials: Trials, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(
        "        return self.head",
        "        if torch.is_autocast_enabled('cpu'):\n"
        "            __import__('os').kill(__import__('os').getpid(), 9)\n"
        "        return self.head",
    )
    assert main(["search", path.name, "--only", "precision"]) == 0
    assert "bf16: killed by signal 9 (SIGKILL), by something outside" in capsys.readouterr().out
    (failed,) = (t for t in trials(path.parent) if t.verdict is Verdict.PLAN_FAILED)
    assert failed.report is not None
    assert failed.report.reason == "killed by signal 9 (SIGKILL), again"
