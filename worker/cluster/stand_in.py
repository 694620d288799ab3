"""The process that stands for a rank on another host: a program, started like the rank itself.

The parent of the ranks sees a process of its own with the usual two pipes. This process starts the
rank through Ray on the other host. It passes events, messages and signals on, and ends as the rank
ends. If the host is lost, it reports that as the rank's error. If this process is killed, Ray ends
the actor, and with it the rank.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn

from autofit.worker import meter
from autofit.worker.cluster.remote_rank import Message, RankEnd, remote_rank
from autofit.worker.launch.child import CONTROL_FD, EVENTS_FD
from autofit.worker.launch.reaper import SESSION
from autofit.worker.meter.nvml import VISIBLE
from autofit.worker.oom.classifier import Kind, classify_exit
from autofit.worker.records.hosts import RemoteHost
from autofit.worker.records.trials import (
    LOST,
    ChildSpec,
    Event,
    Finished,
    PlanEnded,
    Raised,
    Ran,
)

START = 240.0
"""Seconds that Ray has to start the actor. It may have to copy the working directory first."""
SILENCE = 30.0
"""Seconds without an answer of the actor after which the host counts as lost."""
BROKEN = 8.0
"""The same if the connection to the actor is broken, and cannot be made again.

Ray itself needs 15 seconds to say that a host is gone.
"""
_PAUSE = 0.2
_OWN = (EVENTS_FD, CONTROL_FD, SESSION, VISIBLE)
"""Variables that are not for the rank; its host sets its own."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Lost(Exception):
    """The rank's host, or Ray's worker on it, is gone."""


def main() -> None:
    """Stand for the rank that the parent's first message describes."""
    events = Connection(int(os.environ[EVENTS_FD]), readable=False)
    control = Connection(int(os.environ[CONTROL_FD]), writable=False)
    output = _silence()
    told: SimpleQueue[Message | int] = SimpleQueue()
    spec: ChildSpec = control.recv()
    host = spec.host
    assert host is not None, "other ranks are started themselves"
    threading.Thread(target=_listen, args=(control, told), daemon=True).start()
    rank = _Rank(spec, host, events)
    try:
        rank.start(told)
        end = rank.hear()
    except Lost as error:
        rank.report(LOST, str(error))
        os._exit(1)  # Ray may wait for the lost host
    os.write(output, end.output.encode())
    rank.explain(end)
    rank.leave()
    _end_like(end.returncode)


class _Rank:
    """The rank on the other host, as its parent is to see it."""

    def __init__(self, spec: ChildSpec, host: RemoteHost, events: Connection) -> None:
        self._spec = spec
        self._host = host
        self._events = events
        self._actor: Any = None
        self._last: Event | None = None

    def start(self, told: SimpleQueue[Message | int]) -> None:
        """Start the rank; from now on, what is put into ``told`` reaches it."""
        import ray

        meter.forget()  # its host measures the rank
        changes = _changes(dict(self._host.user), os.environ)
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        try:
            ray.init(
                address=self._host.ray,
                namespace=self._host.namespace,
                log_to_driver=False,
                configure_logging=False,
            )
            for number in _SIGNALS:
                signal.signal(number, lambda number, frame: told.put(number))
            self._actor = remote_rank(self._host, self._spec.request)
            node = ray.get(self._actor.start.remote(self._spec, changes), timeout=START)
        except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
            raise Lost(f"Ray starts no worker on {self._host.name}: {_line(error)}") from error
        if node != self._host.node:
            raise Lost(f"{self._host.name} is gone from the cluster")
        threading.Thread(target=self._tell, args=(told,), daemon=True).start()

    def hear(self) -> RankEnd:
        """Pass the events on until the rank has ended."""
        import ray

        heard, last = 0, time.monotonic()
        while True:
            try:
                news: tuple[list[Event], RankEnd | None]
                news = ray.get(self._actor.hear.remote(heard), timeout=SILENCE)
            except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError) as error:
                silent = isinstance(error, ray.exceptions.GetTimeoutError)
                if time.monotonic() - last > (SILENCE if silent else BROKEN):
                    raise Lost(f"{self._host.name} does not answer any more") from error
                time.sleep(_PAUSE)
                continue
            except ray.exceptions.RayError as error:
                raise Lost(f"{self._host.name}, or Ray's worker on it, is gone") from error
            last = time.monotonic()
            for event in news[0]:
                self._send(event)
            heard += len(news[0])
            if news[1] is not None:
                return news[1]

    def explain(self, end: RankEnd) -> None:
        """Report why the rank has ended, unless it has done so itself."""
        if end.error:
            self.report("error", f"on {self._host.name}: {end.error}")
        elif end.returncode < 0 and not isinstance(self._last, Raised | PlanEnded | Finished | Ran):
            found = classify_exit(end.returncode, end.output, oom_kills=end.oom_kills)
            name = signal.strsignal(-end.returncode)
            killed = f"killed by signal {-end.returncode} ({name}) on {self._host.name}"
            if found.kind is Kind.OOM:
                self.report(Kind.OOM.value, f"{killed}: {found.message}")
            else:
                self.report(LOST, killed)

    def report(self, kind: str, message: str) -> None:
        """Send the error that ended the rank."""
        self._send(Raised(index=0, kind=kind, message=message, traceback=""))

    def leave(self) -> None:
        """End the actor, which frees the rank's device."""
        import ray

        ray.kill(self._actor)
        ray.shutdown()

    def _send(self, event: Event) -> None:
        self._last = event
        self._events.send(event)

    def _tell(self, told: SimpleQueue[Message | int]) -> None:
        tell = self._actor.tell.options(concurrency_group="control")
        while True:
            tell.remote(told.get())


def _listen(control: Connection, told: SimpleQueue[Message | int]) -> None:
    """Read the parent's messages; end this process when the parent has ended."""
    try:
        while True:
            told.put(control.recv())
    except (EOFError, OSError):
        os._exit(1)


def _changes(user: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environment`` that autofit has set for this rank."""
    return {
        name: text
        for name, text in environment.items()
        if name not in _OWN and user.get(name) != text
    }


def _silence() -> int:
    """Discard what Ray prints in this process; return a descriptor for the rank's output."""
    output, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    return output


def _end_like(returncode: int) -> NoReturn:
    """End this process as the rank has ended."""
    if returncode < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if returncode != -signal.SIGKILL:
            signal.signal(-returncode, signal.SIG_DFL)
        os.kill(os.getpid(), -returncode)
    sys.exit(returncode)


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


if __name__ == "__main__":
    main()
