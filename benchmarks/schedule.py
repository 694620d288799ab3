"""Several benchmarks on one machine within a time limit, each on cards and cores of its own.

    python benchmarks/schedule.py NAME [--seconds 560] [--out FOLDER]

``schedules.toml`` has the schedules. A schedule has lanes, which run at the same time. A lane has
cards, an equal share of the cores, and commands that run one after the other. A command is skipped
if less time is left than it needs. When the time is over, it is killed with its children. Its
output goes to ``FOLDER/LANE-NUMBER.log``, and ``FOLDER.tgz`` has all of the folder at the end.

In a command, ``{out}`` is the folder, ``{left}`` the seconds that are left, and ``python`` this
Python.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autofit.units import format_duration

HERE = Path(__file__).parent
RESERVE = 15.0
"""Seconds at the end in which nothing runs: children are killed and the results are packed."""


def run_lane(
    lane: dict[str, Any], cores: set[int], out: Path, end: float, say: Callable[[str], None]
) -> None:
    """Run the commands of a lane, one after the other, until ``end`` (by ``time.monotonic``)."""
    cards = ",".join(str(card) for card in lane["cards"])
    for number, command in enumerate(lane["commands"]):
        started = time.monotonic()
        left = end - RESERVE - started
        log = out / f"{lane['name']}-{number}.log"
        line = command["run"].format(out=out, left=int(left))
        if left < command["needs"]:
            say(f"{log.stem}: not started, {format_duration(left)} left: {line}")
            continue
        code = _run(line, cards, cores, log, left)
        ended = "killed" if code is None else f"exit code {code}"
        say(f"{log.stem}: {ended} after {format_duration(time.monotonic() - started)}: {line}")


def _run(line: str, cards: str, cores: set[int], log: Path, seconds: float) -> int | None:
    """Run a command line; return its exit code, or ``None`` if the time was over."""
    words = [sys.executable if word == "python" else word for word in shlex.split(line)]
    with log.open("w") as output:
        output.write(f"$ {line}\n")
        output.flush()
        process = subprocess.Popen(
            words,
            cwd=HERE.parent,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": cards},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        os.sched_setaffinity(process.pid, cores)
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the group of a process; kill it five seconds later."""
    for sign, seconds in ((signal.SIGINT, 5.0), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            continue


def main() -> None:
    """Run the schedule of the command line."""
    schedules = tomllib.loads((HERE / "schedules.toml").read_text())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name", choices=schedules)
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--out", type=Path, default=Path("schedule"))
    given = parser.parse_args()
    started = time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out.resolve()
    lanes = [{"name": name, **lane} for name, lane in schedules[given.name].items()]
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // len(lanes))
    summary = (out / "summary.log").open("w")

    def say(line: str) -> None:
        for stream in (sys.stderr, summary):
            stream.write(f"{format_duration(time.monotonic() - started)}  {line}\n")
            stream.flush()

    threads = []
    for at, lane in enumerate(lanes):
        own = set(cores[at * share : (at + 1) * share]) or set(cores)
        arguments = (lane, own, out, started + given.seconds, say)
        threads.append(threading.Thread(target=run_lane, args=arguments))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    summary.close()
    with tarfile.open(out.with_suffix(".tgz"), "w:gz") as archive:
        archive.add(out, arcname=out.name)


if __name__ == "__main__":
    main()
