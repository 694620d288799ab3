"""Faults of one rank in mid-run, and what has to hold after them.

``python -m tests.faults.rank_faults --count 30`` makes so many, and says how each ended.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

SCRIPT = """\
import os, sys, time
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(1)
kind, where, when = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
heard = os.fstat(1).st_rdev != os.stat(os.devnull).st_rdev  # that of rank 0 alone
here = where == 0 if heard else where == 1
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100000):
    if step == when and here:
        if kind == "out_of_memory":
            torch.empty(1 << 50)
        if kind == "stops":
            break
    loss = nn.functional.cross_entropy(model(torch.randn(6, 8)), torch.randint(3, (6,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.01)
    print(step, flush=True)
"""
KINDS = ("killed", "out_of_memory", "stops")
WITHIN = 15.0
"""Seconds from the fault to the end of the run, and then to the end of all its processes."""
LIMIT = 120.0
"""Seconds for one run."""
EXPECTED = {
    "killed": "killed",
    "out_of_memory": "can't allocate memory",
    "stops": "the ranks do not do the same",
}
"""What the run has to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, and what was wrong after it."""

    kind: str
    rank: int
    step: int
    code: int
    seconds: float
    """From the last step that rank 0 printed to the end of the run."""
    faults: tuple[str, ...]
    """What did not hold; none if all is well."""
    printed: str = ""

    def __str__(self) -> str:
        what = "; ".join(self.faults) or "well"
        where = f"{self.kind}, rank {self.rank}, step {self.step}"
        return f"{where}: ended with {self.code} in {self.seconds:.1f} s: {what}"


def cause(kind: str, rank: int, step: int) -> Fault:
    """Run a training on two ranks in which ``kind`` happens to ``rank`` at ``step``."""
    root = Path(tempfile.mkdtemp(prefix="f", dir="/tmp"))  # short: sockets lie below it
    work, scratch = root / "work", root / "t"
    work.mkdir()
    scratch.mkdir()
    (work / "train.py").write_text(SCRIPT)
    (work / "plan.json").write_text(json.dumps({"plan": {"ranks": "2"}}))
    before = {each.name for each in Path("/dev/shm").iterdir()}
    try:
        return _caused(work, scratch, before, kind, rank, step)
    finally:
        for process in _left(scratch):
            process.kill()
        shutil.rmtree(root, ignore_errors=True)


def _caused(work: Path, scratch: Path, before: set[str], kind: str, rank: int, step: int) -> Fault:
    with open(work / "err", "w+") as err:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "autofit", "run", "--plan", "plan.json", "train.py"),
                *("--", kind, str(rank), str(step)),
            ],
            cwd=work,
            env={**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        )
        try:
            last = time.monotonic()
            assert process.stdout is not None
            for line in process.stdout:
                last = time.monotonic()
                if kind == "killed" and int(line) == step:
                    os.kill(_ranks(process)[rank].pid, signal.SIGKILL)
            code = process.wait(LIMIT)
            seconds = time.monotonic() - last
        finally:
            process.kill()
            process.wait()
        err.seek(0)
        printed = err.read()
    faults = []
    if code == 0:
        faults.append("the run ended with 0")
    if seconds > WITHIN:
        faults.append(f"it took {seconds:.0f} s")
    if EXPECTED[kind] not in printed:
        faults.append("the reason is not named")
    deadline = time.monotonic() + WITHIN
    while (left := _left(scratch)) and time.monotonic() < deadline:
        time.sleep(0.2)
    faults += [f"a process is left: {' '.join(each.cmdline())[:90]}" for each in left]
    names = [each.name for each in scratch.iterdir() if not each.name.startswith("torchinductor")]
    faults += [f"left in the temporary folder: {name}" for name in names]  # that is torch's own
    shared = {each.name for each in Path("/dev/shm").iterdir()} - before
    faults += [f"left in shared memory: {name}" for name in shared if "torch" in name]
    return Fault(
        kind=kind,
        rank=rank,
        step=step,
        code=code,
        seconds=seconds,
        faults=tuple(faults),
        printed=printed,
    )


def _ranks(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the ranks of a run, in the order of their numbers."""
    found = psutil.Process(process.pid).children()
    ranks = (each for each in found if "harness" in " ".join(each.cmdline()))
    return sorted(ranks, key=lambda each: (each.create_time(), each.pid))


def _left(scratch: Path) -> list[psutil.Process]:
    """Return the processes of a run: each has our temporary folder."""
    mark = f"TMPDIR={scratch}".encode()
    return [each for each in psutil.process_iter() if mark in _environment(each)]


def _environment(process: psutil.Process) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return b""


def faults(seed: int) -> Iterator[Fault]:
    """Cause one fault after another, each kind in turn, at random steps of random ranks."""
    draw = random.Random(seed)
    for kind in itertools.cycle(KINDS):
        rank = 1 if kind == "stops" else draw.randrange(2)  # the end of rank 0 is that of the run
        yield cause(kind, rank, draw.randrange(1, 120))


def main() -> None:
    """Cause faults, and end with 1 if one of them left what it must not leave."""
    parser = argparse.ArgumentParser(description="Fail one rank of a training, again and again.")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    bad = 0
    for number, fault in enumerate(itertools.islice(faults(arguments.seed), arguments.count), 1):
        print(f"{number}/{arguments.count} {fault}", flush=True)
        if fault.faults:
            bad += 1
            print(fault.printed, flush=True)
    print(f"{arguments.count - bad} of {arguments.count} well")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
