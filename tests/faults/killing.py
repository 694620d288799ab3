"""kill -9 of one process of a small search, and what has to hold after the same command again.

``python -m tests.faults.killing --count 100`` does it so many times, and says how each ended.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from autofit.storage import Purpose, State, Store, StudyRecord, TrialRecord
from autofit.worker.records.trials import Verdict

SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 512), nn.Linear(512, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.mean(-1)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    x = torch.randn(256, 8)
    loss = nn.functional.mse_loss(model(x), x.mean(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
COMMAND = (
    *("-m", "autofit", "search", "train.py", "--memory", "2.25MiB", "--trials", "3"),
    *("--only", "checkpointing", "--only", "micro_batch", "--allow", "exact"),
)
"""The script does not fit as it is."""
GONE_WITHIN = 15.0
"""Seconds after its end in which nothing of a search may be left."""
LIMIT = 240.0
"""Seconds for one search; it takes some twenty on an idle machine."""


def _named(word: str) -> Callable[[psutil.Process, list[str]], bool]:
    return lambda process, line: word in process.name()


def _started_as(word: str) -> Callable[[psutil.Process, list[str]], bool]:
    return lambda process, line: any(word in each for each in line[:6])


TARGETS: dict[str, Callable[[psutil.Process, list[str]], bool]] = {
    "controller": lambda process, line: line[2:4] == ["autofit", "search"],
    "trial": _started_as("harness/__main__.py"),
    "raylet": _named("raylet"),
    "gcs": _named("gcs_server"),
    "slot": _started_as("ray::Slot"),
    "reaper": _started_as("reaper.py"),
}
"""The processes of a search, each by what tells it from the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill, and what was wrong after it."""

    target: str
    after: float
    """Seconds from the start of the search; then it waits for the process to be there."""
    killed: bool
    """It was still there."""
    code: int
    """Exit code of the search whose process it was."""
    seconds: float
    faults: tuple[str, ...]
    """What did not hold; none if all is well."""
    printed: str = ""

    def __str__(self) -> str:
        what = "; ".join(self.faults) or "well"
        when = f"after {self.after:.1f} s" if self.killed else "(had ended)"
        return f"{self.target} {when}: ended with {self.code}, {self.seconds:.0f} s: {what}"


class Place:
    """A folder for one study, with a temporary folder of its own, looked through afterwards."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="k", dir="/tmp"))  # short: sockets lie below it
        self.work, self.scratch = self.root / "work", self.root / "t"
        self.work.mkdir()
        self.scratch.mkdir()
        (self.work / "train.py").write_text(SCRIPT)

    @contextmanager
    def search(self) -> Iterator[subprocess.Popen[str]]:
        """A search; afterwards its own process has ended."""
        environment = {**os.environ, "TMPDIR": str(self.scratch), "OMP_NUM_THREADS": "1"}
        environment.pop("AUTOFIT_STORAGE", None)
        with open(self.root / "printed", "a+") as printed:
            process = subprocess.Popen(
                [sys.executable, *COMMAND],
                cwd=self.work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def printed(self) -> str:
        """Return what the searches here have printed."""
        return (self.root / "printed").read_text()

    def study(self) -> tuple[StudyRecord | None, tuple[TrialRecord, ...]]:
        """Return the newest study and its finished trials; nothing while there is none."""
        if not (self.work / "autofit.db").exists():
            return None, ()
        with Store(str(self.work / "autofit.db")) as store:
            if not (studies := store.studies()):
                return None, ()
            return studies[0], store.trials(studies[0], state=State.FINISHED)

    def studies(self) -> int:
        """Return how many studies there are: one, if each search has taken up the one before."""
        with Store(str(self.work / "autofit.db")) as store:
            return len(store.studies())

    def unfinished(self) -> int:
        """Return how many trials are said to run."""
        with Store(str(self.work / "autofit.db")) as store:
            return len(store.trials(store.studies()[0], state=State.RUNNING))

    def processes(self) -> list[psutil.Process]:
        """Return what runs of all searches here: each has our temporary folder, or its mark."""
        mark = f"TMPDIR={self.scratch}".encode()
        return [each for each in psutil.process_iter() if mark in _environment(each)]

    def left(self) -> list[str]:
        """Return the processes and scratch folders that are left, in words, once it is time."""
        deadline = time.monotonic() + GONE_WITHIN
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def _left(self) -> list[str]:
        running = [f"a process is left: {' '.join(_line(p))[:90]}" for p in self.processes()]
        return running + [f"left in the temporary folder: {p.name}" for p in self.scratch.iterdir()]

    def remove(self) -> None:
        """End what is left, and delete the folder."""
        for process in self.processes():
            process.kill()
        shutil.rmtree(self.root, ignore_errors=True)


def _environment(process: psutil.Process) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return b""


def _line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """What a search comes to that nobody disturbs."""

    left_out: frozenset[tuple[str, str, str]]
    verdicts: frozenset[tuple[str, str]]
    """``(plan, verdict)`` of each trial."""
    seconds: float


def undisturbed() -> Undisturbed:
    """Search without a kill."""
    place, started = Place(), time.monotonic()
    try:
        with place.search() as process:
            code = process.wait(LIMIT)
        assert code == 0, place.printed()
        study, trials = place.study()
        assert study is not None
        assert not place.left(), place.left()
        return Undisturbed(
            left_out=frozenset(study.left_out),
            verdicts=frozenset((str(t.plan), str(t.verdict)) for t in trials),
            seconds=time.monotonic() - started,
        )
    finally:
        place.remove()


def kill(target: str, chance: random.Random, plain: Undisturbed) -> Kill:
    """Search, kill ``target`` at a random moment, search again, and look at what there is."""
    place, started = Place(), time.monotonic()
    wait = chance.uniform(0, 0.7 * plain.seconds)
    faults: list[str] = []
    try:
        with place.search() as process:
            killed = _kill_in(place, process, target, wait)
            code = _ended(process, faults, f"after the kill of the {target}")
        faults += place.left()
        _, before = place.study()
        with place.search() as process:
            again = _ended(process, faults, "taken up again")
        if again != 0:
            faults.append(f"taken up again it ended with {again}")
        faults += place.left()
        faults += _of_the_study(place, before, plain)
        return Kill(
            target=target,
            after=wait,
            killed=killed,
            code=code,
            seconds=time.monotonic() - started,
            faults=tuple(faults),
            printed=place.printed() if faults else "",
        )
    finally:
        place.remove()


def _kill_in(place: Place, search: subprocess.Popen[str], target: str, wait: float) -> bool:
    """Kill the process that is ``target``, once ``wait`` seconds are over and it is there."""
    deadline = time.monotonic() + wait
    while search.poll() is None:
        if time.monotonic() >= deadline:
            for process in place.processes():
                if TARGETS[target](process, _line(process)):
                    os.kill(process.pid, signal.SIGKILL)
                    return True
        time.sleep(0.1)
    return False


def _ended(search: subprocess.Popen[str], faults: list[str], what: str) -> int:
    try:
        return search.wait(LIMIT)
    except subprocess.TimeoutExpired:
        faults.append(f"{what} it hangs")
        return -1


def _of_the_study(
    place: Place, before: tuple[TrialRecord, ...], plain: Undisturbed
) -> Iterator[str]:
    """Yield what is wrong with the study once it has been taken up again."""
    study, trials = place.study()
    if study is None:
        yield "no study"
        return
    if (number := place.studies()) != 1:
        yield f"{number} studies: the one before was not taken up again"
    after = {trial.id: (trial.report, trial.launch) for trial in trials}
    if any(after.get(each.id) != (each.report, each.launch) for each in before):
        yield "a finished trial is lost, or another"
    plans = Counter(trial.plan for trial in trials if trial.purpose is Purpose.SEARCH)
    if twice := [str(plan) for plan, times in plans.items() if times > 1]:
        yield f"finished twice: {', '.join(twice)}"
    for name, level, reason in frozenset(study.left_out) - plain.left_out:
        yield f"banned: {name} {level}: {reason}"
    for trial in trials:
        told = str(trial.plan), str(trial.verdict)
        if trial.verdict is not Verdict.MEASURED and told not in plain.verdicts:
            reason = trial.report.reason if trial.report else ""
            yield f"blamed: {told[0]}: {told[1]}: {reason}"
    confirmed = {t.verdict for t in trials if t.purpose is Purpose.CONFIRM}
    if Verdict.MEASURED not in confirmed:
        yield "no winner was confirmed"
    if running := place.unfinished():
        yield f"{running} trials are said to run"


def main() -> int:
    """Return 1 if anything did not hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=TARGETS, action="append", help="repeatable")
    options = parser.parse_args()
    chance, started = random.Random(options.seed), time.monotonic()
    plain = undisturbed()
    print(f"undisturbed: {plain.seconds:.0f} s, {len(plain.left_out)} left out", flush=True)
    targets = options.target or list(TARGETS)
    bad: Counter[str] = Counter()
    kills: Counter[str] = Counter()
    for target in itertools.cycle(targets):
        made = kill(target, chance, plain)
        kills[made.target] += made.killed
        bad.update(made.faults)
        print(f"{kills.total():4} {made}", flush=True)
        if made.faults:
            print(made.printed, flush=True)
        if kills.total() >= options.count:
            break
    print(f"{kills.total()} in {time.monotonic() - started:.0f} s; killed: {dict(kills)}")
    for fault, times in bad.most_common():
        print(f"{times:4} {fault}")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
