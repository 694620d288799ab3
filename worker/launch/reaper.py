"""Kills a session's processes after its driver has ended. Imports only the standard library.

Every process of a session has ``AUTOFIT_SESSION=<id>`` in its environment. The driver starts a
reaper by path with ``python -I -S`` and holds the other end of the reaper's pipe. When the pipe
breaks, the reaper kills all processes of the session and their descendants, removes the session's
folder and exits. After an orderly end there is nothing to kill.

The launcher reads ``/proc`` with this module too. Formats: proc(5).
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
"""Argument that makes the reaper fork, so that it is no child of the driver."""
_KILL_SECONDS = 60.0
"""Seconds after which the reaper gives up on a process that is stuck in a device driver."""


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """A process, as ``/proc`` shows it."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    started: int
    """Clock ticks from boot to its start; distinguishes it from a later process with the same id.
    """

    @property
    def alive(self) -> bool:
        """Whether it still holds resources; a zombie does not."""
        return self.state not in "ZX"


def processes() -> dict[int, ProcessEntry]:
    """Return all processes of the machine by id."""
    found = (_read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def _read(pid: int) -> ProcessEntry | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # the process has ended
        return None
    # The second field is the command in brackets. It may contain spaces and brackets itself.
    fields = stat[stat.rindex(b")") + 2 :].split()
    parent, group, session, started = (int(fields[i]) for i in (1, 2, 3, 19))
    return ProcessEntry(pid, fields[0].decode(), parent, group, session, started)


def with_descendants(roots: Collection[int], table: dict[int, ProcessEntry]) -> set[ProcessEntry]:
    """Return the processes of ``table`` with these ids, and all their descendants."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[ProcessEntry] = set()
    queue = list(roots)
    while queue:
        member = table.get(queue.pop())
        if member is not None and member not in found:
            found.add(member)
            queue += children.get(member.pid, [])
    return found


def marked(session: str, table: dict[int, ProcessEntry]) -> set[int]:
    """Return the ids of the processes that were started with ``session`` in their environment."""
    mark = f"{SESSION}={session}".encode()
    return {pid for pid in table if mark in _environment(pid)}


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # the process has ended, or belongs to another user
        return []


def kill_until_gone(
    choose: Callable[[dict[int, ProcessEntry]], Collection[ProcessEntry]], seconds: float
) -> set[int]:
    """Kill the processes that ``choose`` returns, again and again, until none of them is alive.

    ``choose`` is called with the process table in each round. Processes that it returned in an
    earlier round are killed too. The calling process is never killed.
    Returns the ids still alive after ``seconds``; such processes are stuck in the kernel.
    """
    deadline = time.monotonic() + seconds
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
            # The process may have ended, and another user's process may have its id.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


class Reaper:
    """Starts a reaper for ``session`` and keeps its pipe open.

    When the pipe breaks, also because this process was killed, the reaper kills the session's
    processes and removes ``folder``. With ``aside``, the reaper first makes ``folder``. It is then
    no child of this process, because others may kill those; ``finish`` cannot wait for it.
    Raises ``OSError`` when the folder cannot be made.
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
        """Close the pipe, so that the reaper ends the session, and wait for the reaper."""
        self._process.communicate()


def main(session: str, folder: str, aside: str = "") -> None:
    """Wait until standard input is closed, then end the session."""
    if aside:
        Path(folder).mkdir(mode=0o700)
        if os.fork():
            return
    while os.read(sys.stdin.fileno(), 4096):
        pass
    kill_until_gone(lambda table: with_descendants(marked(session, table), table), _KILL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
