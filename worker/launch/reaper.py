"""Ends what a driver leaves behind, however the driver went. Imports only the standard library.

Every process of a session carries ``AUTOFIT_SESSION=<id>`` in the environment it was started with.
A reaper, started by path with ``python -I -S``, waits on a pipe that the driver holds. When that
breaks it kills every process of the session, and what those have started, until none is left,
removes the session's folder and exits. After an orderly end it finds nothing to do.

The reading of ``/proc`` serves the launcher as well. Formats: proc(5).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

SESSION = "AUTOFIT_SESSION"
"""Name of the variable that marks the processes of a session."""

_ASIDE = "aside"
"""Tells the reaper to leave its parent."""
_PATIENCE = 60.0
"""Seconds after which the reaper gives up on a process that cannot die (stuck in a driver)."""


@dataclass(frozen=True, slots=True)
class Process:
    """One living process, as the kernel shows it."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    started: int
    """Clock ticks from boot to its start: tells it from a later one of the same id."""

    @property
    def alive(self) -> bool:
        """Whether it still holds anything: a zombie does not."""
        return self.state not in "ZX"


def processes() -> dict[int, Process]:
    """Return every process there is, by its id."""
    found = (_read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def _read(pid: int) -> Process | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # it ended meanwhile
        return None
    # The second field is the command in brackets, and may itself hold spaces and brackets.
    fields = stat[stat.rindex(b")") + 2 :].split()
    parent, group, session, started = (int(fields[i]) for i in (1, 2, 3, 19))
    return Process(pid, fields[0].decode(), parent, group, session, started)


def with_descendants(roots: Collection[int], table: dict[int, Process]) -> set[Process]:
    """Return the processes of ``table`` with these ids, and all that descend from them."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[Process] = set()
    queue = list(roots)
    while queue:
        member = table.get(queue.pop())
        if member is not None and member not in found:
            found.add(member)
            queue += children.get(member.pid, [])
    return found


def marked(session: str, table: dict[int, Process]) -> set[int]:
    """Return the processes that were started with ``session`` in their environment."""
    mark = f"{SESSION}={session}".encode()
    return {pid for pid in table if mark in _environment(pid)}


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it ended meanwhile, or belongs to somebody else
        return []


def kill_until_gone(
    choose: Callable[[dict[int, Process]], Collection[Process]], patience: float
) -> set[int]:
    """Kill what ``choose`` picks, and whatever was picked before, until nothing of it lives.

    Returns the ids still alive after ``patience`` seconds: none, but for processes stuck in the
    kernel. This process is never killed.
    """
    deadline = time.monotonic() + patience
    pause = 0.005
    picked: dict[int, int] = {}
    while True:
        table = processes()
        picked |= {process.pid: process.started for process in choose(table)}
        alive = {
            process.pid
            for process in table.values()
            if process.alive
            and picked.get(process.pid) == process.started
            and process.pid != os.getpid()
        }
        if not alive or time.monotonic() > deadline:
            return alive
        for pid in alive:
            _kill(pid)
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def _kill(pid: int) -> None:
    # It may have ended meanwhile, and its id gone to somebody else.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


class Reaper:
    """The driver's handle of a reaper it has started for ``session``.

    When its pipe breaks, which the kernel sees to should this process be killed, the reaper ends
    the session and removes ``folder``. ``aside``: it makes the folder too, which is there from here
    on, and is no child of this process, for others may kill those; it cannot be waited for then.
    Raises ``OSError`` where the folder cannot be made.
    """

    def __init__(self, session: str, folder: Path, *, aside: bool = False) -> None:
        environment = {key: value for key, value in os.environ.items() if key != SESSION}
        program = [sys.executable, "-I", "-S", str(Path(__file__).resolve())]
        self._process = subprocess.Popen(
            [*program, session, str(folder), *([_ASIDE] if aside else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
            cwd="/",
        )
        if aside and self._process.wait():
            raise OSError(f"the folder {folder} cannot be made")

    def finish(self) -> None:
        """Let the reaper end what is left of the session, and wait until it has."""
        self._process.communicate()


def main(session: str, folder: str, aside: str = "") -> None:
    """Wait until standard input breaks, then end the session."""
    if aside:
        Path(folder).mkdir(mode=0o700)
        if os.fork():
            return
    while os.read(sys.stdin.fileno(), 4096):
        pass
    kill_until_gone(lambda table: with_descendants(marked(session, table), table), _PATIENCE)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
