"""A Ray on this machine that outlives the process that started it: for a service.

Its folder is named by the store that the service uses. A later process with the same store finds
the running Ray there. The folder holds Ray's address and its token, and belongs to one user.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from autofit.exceptions import UsageError, WorkerError
from autofit.worker.cluster.local_ray import (
    OF_RAY,
    START,
    address_in,
    answers,
    check_started,
    short_folder,
    start_head,
    variables,
)
from autofit.worker.launch import reaper

_CORE = ("raylet", "gcs_server")
"""Names of the two processes that make a Ray of one machine."""
_ASKED = 5
"""How often Ray is asked before it counts as hung: a new one would end all running searches.

On a busy machine, it may need more than the seconds of one question.
"""
_GOODBYE = 15.0
"""Seconds that the service has to end after SIGTERM."""
_KILL = 30.0
"""Seconds within which the processes of Ray have to end after SIGKILL."""


class DetachedRay:
    """The Ray of a service on this machine, one for each store and user.

    Raises ``UsageError`` if another user owns its folder.
    """

    def __init__(self, storage: str) -> None:
        """``storage``: the SQLAlchemy URL of the store."""
        digest = hashlib.sha256(f"{os.getuid()} {storage}".encode()).hexdigest()
        self._session = f"service-{digest[:16]}"
        self.folder = Path(short_folder(), f"autofit-{digest[:8]}")
        self._of_ray = self.folder / OF_RAY
        self._core: list[psutil.Process] = []
        """Ray's own two processes, without which nothing runs."""
        self._lock = -1
        """Descriptor of the file that the service of this process holds."""

    def hold(self) -> None:
        """Make this process the one service of the store here, until it ends.

        Raises ``UsageError`` if another process is.
        """
        self._make_folder()
        self._lock = os.open(self.folder / "service", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"process {self._holder()} already serves this store on this machine:"
                " `autofit serve --stop` ends it"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def attach(self, searches: int) -> tuple[str, bool]:
        """Return the address of this Ray, and whether it had to be started.

        ``searches``: on a machine without GPUs, the searches that run at a time. Sets the variables
        in ``os.environ`` with which this process can join. Raises ``WorkerError`` if Ray does not
        start.
        """
        self._make_folder()
        settings = {**variables(self._session, self._token()), "RAY_AUTH_MODE": "token"}
        del settings[reaper.SESSION]
        os.environ.update(settings)
        address = address_in(self._of_ray)
        self._core = self._found_core()
        whole = address and len(self._core) == len(_CORE)
        started = not (whole and any(answers(address) for _ in range(_ASKED)))
        if started:
            self._kill()
            self._start(searches)
            self._core = self._found_core()
        return address_in(self._of_ray), started

    def whole(self) -> bool:
        """Return whether Ray's own processes run that ``attach`` has found."""
        return all(map(_runs, self._core))

    def stop(self) -> bool:
        """End the service, then its Ray with all searches; return whether anything ran.

        The searches stay in the store. The next service takes them up.
        """
        with self._end_service() as running:
            killed = self._kill()
            shutil.rmtree(self.folder, ignore_errors=True)
        return running or killed

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            found = self.folder.lstat()
        except OSError as error:
            raise UsageError(f"the folder {self.folder} cannot be made: {error}") from error
        private = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
        if found.st_uid != os.getuid() or not private:
            raise UsageError(
                f"the folder {self.folder} is open to others, and Ray's token would lie there:"
                " remove it, or set TMPDIR to another folder"
            )

    def _token(self) -> str:
        """Return the token that this Ray requires; the first call makes it."""
        file = self.folder / "token"
        try:
            made = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return file.read_text()
        with os.fdopen(made, "w") as stream:
            stream.write(secrets.token_hex(32))
        return file.read_text()

    def _start(self, searches: int) -> None:
        shutil.rmtree(self._of_ray, ignore_errors=True)
        environment = {**os.environ, reaper.SESSION: self._session}
        environment.pop("AUTOFIT_ORIGIN", None)
        resources = [f"--num-cpus={searches}"]
        starting = start_head(self._of_ray, resources=resources, environment=environment, cwd="/")
        try:
            starting.wait(START)
        except subprocess.TimeoutExpired:
            starting.kill()
            raise WorkerError(f"Ray did not start within {START:.0f} s") from None
        check_started(starting)

    def _found_core(self) -> list[psutil.Process]:
        found = []
        for pid in reaper.marked(self._session, reaper.processes()):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.name() in _CORE and _runs(process):
                    found.append(process)
        return found

    def _holder(self) -> str:
        try:
            return (self.folder / "service").read_text() or "?"
        except OSError:
            return "?"

    @contextlib.contextmanager
    def _end_service(self) -> Iterator[bool]:
        """End the process that holds the lock, if there is one, and hold it; yield whether it ran.

        So a service that something starts again meanwhile does not start its Ray.
        """
        try:
            lock = os.open(self.folder / "service", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            yield False
            return
        deadline, told = time.monotonic() + _GOODBYE, False
        try:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    kind = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
                    if not told or kind is signal.SIGKILL:
                        os.kill(int(self._holder()), kind)
                    told = True
                    time.sleep(0.1)
            yield told
        finally:
            os.close(lock)

    def _kill(self) -> bool:
        """Kill every process of this Ray; return whether there was one."""

        def ours(table: dict[int, reaper.ProcessEntry]) -> set[reaper.ProcessEntry]:
            return reaper.with_descendants(reaper.marked(self._session, table), table)

        found = bool(ours(reaper.processes()))
        if reaper.kill_until_gone(ours, _KILL):
            raise WorkerError("some processes of the service's Ray do not end")
        return found


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
