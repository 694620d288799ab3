"""Searches on a Ray cluster: every node is used, and what is lost with one runs elsewhere."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from autofit.analysis import acquisition
from autofit.storage import Purpose, State, Store, TrialRecord
from autofit.tuning.controller import search
from autofit.tuning.notices import Line, Notice, TrialStarted
from autofit.tuning.options import SearchOptions
from autofit.worker.records.trials import Script, Verdict
from tests.tuning.finished import SLOW, check_nothing_lost, finished

Trials = Callable[..., tuple[TrialRecord, ...]]

COMMAND = [sys.executable, "-m", "autofit", "search", "train.py", "--address"]
GONE_WITHIN = 30.0
"""Seconds after the end of a driver in which its workers are gone: Ray has to miss it first."""
ENDS = ("ended on the machine where the search was started", "nothing else has run yet")
"""What may be said last of a search that lost too much, and carries on when asked again."""
KINDS = ("worker",) * 10 + ("raylet",) * 5 + ("driver",) * 5


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The temporary folder of the cluster's nodes and of what is started here."""
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def four(temporary: Path, ray_cluster: Any) -> Any:
    """A cluster of four nodes with a CPU each."""
    for _ in range(4):
        ray_cluster.add()
    return ray_cluster


def workers(cluster: Any) -> list[psutil.Process]:
    """The workers of autofit's that the cluster's nodes run."""
    found = []
    for raylet in cluster.raylets:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(raylet).children()
            found += [child for child in children if "Slot" in " ".join(child.cmdline())]
    return found


def of_trials(temporary: Path) -> list[psutil.Process]:
    """Processes that trials have started, and the reapers that wait for their end."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mine = process.environ().get("TMPDIR") == str(temporary)
            line = " ".join(process.cmdline())
            if mine and ("harness" in line or "reaper.py" in line):
                found.append(process)
    return found


def check_nothing_left(cluster: Any, temporary: Path) -> None:
    """Neither workers, nor what they started, nor files: within seconds."""
    deadline = time.monotonic() + GONE_WITHIN
    while left := [*workers(cluster), *of_trials(temporary), *temporary.glob("autofit-*")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.full
def test_a_search_uses_every_node(
    four: Any,
    temporary: Path,
    script: Callable[..., Path],
    trials: Trials,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        acquisition, "worthwhile", acquisition.prospects
    )  # whatever is not dominated is measured
    path = script("    optimizer.step()\n", SLOW)
    heard: list[Notice] = []
    options = SearchOptions(
        script=Script(target=path.name, cwd=str(path.parent)),
        storage=f"sqlite:///{path.parent / 'autofit.db'}",
        address=four.address,
        trials=10,
    )
    result = search(options, heard.append)
    assert {each.slot for each in heard if isinstance(each, TrialStarted)} == {0, 1, 2, 3}
    assert [each.text for each in heard if isinstance(each, Line) and "gone" in each.text] == []
    assert result.baseline_verdict is Verdict.MEASURED
    assert trials(path.parent)[-1].purpose is Purpose.CONFIRM
    check_nothing_left(four, temporary)


class Chaos:
    """A search that is killed in parts, and started again when it has ended."""

    def __init__(self, cluster: Any, folders: Iterator[Path], trials: Trials, seed: int) -> None:
        self._cluster = cluster
        self._folders = folders
        self._trials = trials
        self._chance = random.Random(seed)
        self.folder = next(folders)
        self._known: tuple[TrialRecord, ...] = ()
        self.searches = 1
        self.done: Counter[str] = Counter()
        self._driver = self._start()

    def _start(self) -> subprocess.Popen[str]:
        with (self.folder / "log.txt").open("a") as log:
            return subprocess.Popen(
                [*COMMAND, self._cluster.address],
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def strike(self, kind: str) -> None:
        """Kill a part at some moment while a search runs."""
        time.sleep(self._chance.uniform(1, 9))
        while not self._struck(kind):
            self._carry_on()
            time.sleep(0.2)
        self.done[kind] += 1

    def _struck(self, kind: str) -> bool:
        """Kill a part of the running search; ``False`` where there is none at this moment."""
        found = workers(self._cluster)
        if not found or self._driver.poll() is not None:
            return False
        try:
            if kind == "worker":
                self._chance.choice(found).kill()
            elif kind == "driver":
                self._driver.kill()
            else:
                alive = [pid for pid in self._cluster.raylets if psutil.pid_exists(pid)]
                victim = self._chance.choice(alive)
                os.kill(victim, signal.SIGKILL)
                self._cluster.raylets.remove(victim)
                self._cluster.add()
        except psutil.NoSuchProcess:  # it has ended by itself, a moment ago
            return False
        return True

    def _carry_on(self) -> None:
        """See to it that a search runs: the same again where one was cut off, else another."""
        if self._driver.poll() is None:
            return
        self._check()
        if self._driver.returncode == 0:
            self.folder, self._known = next(self._folders), ()
            self.searches += 1
        self._driver = self._start()

    def _check(self) -> None:
        log = (self.folder / "log.txt").read_text()
        last = log.splitlines()[-1] if log else ""
        cut_off = self._driver.returncode == -signal.SIGKILL or any(each in last for each in ENDS)
        assert self._driver.returncode == 0 or cut_off, log
        found = finished(self.folder, self._trials)
        check_nothing_lost(self._known, found)
        self._known = found

    def end(self) -> None:
        """Let the search come to its end."""
        while True:
            self._driver.wait(timeout=300)
            self._check()
            if self._driver.returncode == 0:
                return
            self._driver = self._start()


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_killed_in_parts_searches_carry_on(
    four: Any, temporary: Path, script: Callable[..., Path], trials: Trials, tmp_path: Path
) -> None:
    def folders() -> Iterator[Path]:
        for number in range(1000):
            (tmp_path / str(number)).mkdir()
            yield script("    optimizer.step()\n", SLOW, name=f"{number}/train.py").parent

    chaos = Chaos(four, folders(), trials, seed=7)
    kinds = list(KINDS)
    random.Random(7).shuffle(kinds)
    for kind in kinds:
        chaos.strike(kind)
    chaos.end()
    assert chaos.done == Counter(KINDS)
    for number in range(chaos.searches):
        folder = tmp_path / str(number)
        found = finished(folder, trials)
        check_nothing_lost((), found)
        assert found[-1].purpose is Purpose.CONFIRM
        assert trials(folder, State.RUNNING) == ()
        with Store(str(folder / "autofit.db")) as store:
            assert len(store.studies()) == 1
    check_nothing_left(four, temporary)
