"""A rank on another host, as the parent of the ranks sees it. Imports no torch."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autofit.exceptions import WorkerError
from autofit.facts import HOST
from autofit.worker import meter
from autofit.worker.cluster.actor import ActorSetting
from autofit.worker.cluster.pool import first_line
from autofit.worker.cluster.rank_actor import RankActor, RankEnd
from autofit.worker.launch.child import Message, Tail
from autofit.worker.launch.reaper import SESSION
from autofit.worker.meter import VISIBLE
from autofit.worker.oom.classifier import ErrorKind, classify_exit
from autofit.worker.records.trials import (
    LOST,
    ChildSpec,
    Event,
    Finished,
    LaunchRequest,
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
_OF_HOST = (SESSION, *VISIBLE)
"""Variables that the rank's host sets itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteHost:
    """The device of another host that Ray has reserved for a rank; a ``tasks.Host``."""

    name: str
    node: str
    """Ray's identifier of the host."""
    group: Any
    """The placement group of all ranks."""
    bundle: int
    """Number of the rank's bundle in the placement group."""
    user: Mapping[str, str]
    """The environment in which the user started the run."""
    code: str | None = None
    """URI of autofit's own code; ``None`` if the host is this one."""
    folder: str | None = None
    """URI of the working directory's copy; ``None`` if the host sees the directory itself."""

    def start(self, spec: ChildSpec, environment: Mapping[str, str]) -> RemoteRank:
        """Start a rank; raise ``WorkerError`` if Ray starts no worker on a host any more."""
        import ray

        own = dict(environment)
        meter.forget(own)  # its host measures the rank
        changes = {
            name: text
            for name, text in own.items()
            if name not in _OF_HOST and self.user.get(name) != text
        }
        try:
            actor = self._actor(spec.request)
            return RemoteRank(self, spec.rank, actor, actor.start.remote(spec, changes))
        except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
            raise WorkerError(
                f"Ray starts no worker on {self.name}: {first_line(error)}"
            ) from error

    def _actor(self, request: LaunchRequest) -> Any:
        import ray

        setting = ActorSetting(
            device=request.device,
            environment=dict(self.user),
            here=False,
            folder=request.script.cwd if self.folder else None,
        )
        carried: dict[str, Any] = {"py_modules": [self.code]} if self.code else {}
        if self.folder:
            carried["working_dir"] = self.folder
        options = in_bundle(self.group, self.bundle, request.device)
        remote: Any = ray.remote  # its stubs know no concurrency groups
        actor = remote(concurrency_groups={"control": 1}, runtime_env=carried, **options)
        return actor(RankActor).remote(setting)


class RemoteRank:
    """A rank on another host; a ``tasks.Rank``.

    If the host is lost, this object reports that as the rank's error. When this process ends, Ray
    ends the actor, and with it the rank.
    """

    def __init__(self, host: RemoteHost, rank: int, actor: Any, started: Any) -> None:
        """``started``: Ray's reference to the answer of ``RankActor.start``."""
        self.rank = rank
        self.tail = Tail()
        self.pids: tuple[int, ...] = ()
        self.returncode: int | None = None
        self._host = host
        self._actor = actor
        self._started = started
        self._last: Event | None = None
        self._ended = self._killed = False

    def events(self) -> Iterator[Event]:
        """Yield the rank's events until it has ended.

        The last one says why it has ended, if the rank itself has not said so.
        """
        try:
            self._await_start()
            end = yield from self._hear()
        except _LostError as error:
            if not self._killed:
                self.returncode = 1
                yield _raised(LOST, str(error))
        else:
            self.tail.feed(end.output.encode())
            self.returncode = None if self._killed else end.returncode
            yield from self._explain(end)
        self._ended = True

    def answer(self, answer: Message) -> None:
        """Send the rank the answer that it is waiting for."""
        self._tell(answer)

    def signal(self, number: int) -> None:
        """Send the rank a signal; do nothing if it has ended."""
        self._tell(number)

    def kill(self) -> bool:
        """End the actor, and with it the rank; return ``False`` if the rank had ended."""
        if self._ended:
            return False
        self._killed = True
        self.end()
        return True

    def end(self) -> None:
        """End the actor, which frees the rank's device."""
        import ray

        ray.kill(self._actor)

    def _tell(self, message: Message | int) -> None:
        self._actor.tell.options(concurrency_group="control").remote(message)

    def _await_start(self) -> None:
        import ray

        try:
            node = ray.get(self._started, timeout=START)
        except ray.exceptions.RayError as error:
            reason = first_line(error)
            raise _LostError(f"Ray starts no worker on {self._host.name}: {reason}") from error
        if node != self._host.node:
            raise _LostError(f"{self._host.name} is gone from the cluster")

    def _hear(self) -> Generator[Event, None, RankEnd]:
        import ray

        heard, last = 0, time.monotonic()
        while True:
            try:
                news: tuple[list[Event], RankEnd | None]
                news = ray.get(self._actor.hear.remote(heard), timeout=SILENCE)
            except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError) as error:
                silent = isinstance(error, ray.exceptions.GetTimeoutError)
                if self._killed or time.monotonic() - last > (SILENCE if silent else BROKEN):
                    raise _LostError(f"{self._host.name} does not answer any more") from error
                time.sleep(_PAUSE)
                continue
            except ray.exceptions.RayError as error:
                raise _LostError(f"{self._host.name}, or Ray's worker on it, is gone") from error
            last = time.monotonic()
            for self._last in news[0]:
                yield self._last
            heard += len(news[0])
            if news[1] is not None:
                return news[1]

    def _explain(self, end: RankEnd) -> Iterator[Event]:
        """Yield why the rank has ended, unless it has said so itself."""
        if end.error:
            yield _raised("error", f"on {self._host.name}: {end.error}")
        elif end.returncode < 0 and not isinstance(self._last, Raised | PlanEnded | Finished | Ran):
            found = classify_exit(end.returncode, end.output, oom_kills=end.oom_kills)
            name = signal.strsignal(-end.returncode)
            killed = f"killed by signal {-end.returncode} ({name}) on {self._host.name}"
            if found.kind is ErrorKind.OOM:
                yield _raised(ErrorKind.OOM.value, f"{killed}: {found.message}")
            else:
                yield _raised(LOST, killed)


class _LostError(Exception):
    """The rank's host, or Ray's worker on it, is gone."""


def _raised(kind: str, message: str) -> Raised:
    return Raised(index=0, kind=kind, message=message, traceback="")


def in_bundle(group: Any, bundle: int, device: str) -> dict[str, Any]:
    """Return the options that give an actor one bundle of a placement group: a GPU or a CPU."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle
    )
    gpus = int(device != HOST)
    return {"num_cpus": 1 - gpus, "num_gpus": gpus, "scheduling_strategy": strategy}
