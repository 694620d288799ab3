"""Starts an actor for each search, and notes actors that were lost, in a process of its own.

Ray's client ends its process, or hangs in it, when a part of Ray ends. So the service has none: the
process of this module joins Ray and says every moment that it goes on. If it stops saying so, or if
the service's own Ray lost a process, the service starts both again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import IO, Any

from autofit.exceptions import AutofitError, StorageError
from autofit.service.runner import NAMESPACE, SearchRunner
from autofit.storage import Queue, Store
from autofit.storage.convert import from_json, to_json
from autofit.storage.engine import BUSY_SECONDS
from autofit.worker.cluster import nodes
from autofit.worker.cluster.detached_ray import DetachedRay
from autofit.worker.cluster.local_ray import RaySession
from autofit.worker.cluster.nodes import ClusterNode

POLL = 0.5
"""Seconds between two looks at the queue."""
LOOK = 5.0
"""Seconds between two looks at the machines of the cluster."""
TIDY = 60.0
"""Seconds between two looks for uploads that are no longer needed."""
BIRTH = 30.0
"""Seconds after which an actor that has claimed nothing is ended, and another one started.

The next one has twice as long, ``MOST_PATIENCE`` at most: on a busy machine, its imports alone
may take a minute.
"""
MOST_PATIENCE = 240.0
"""Most seconds that an actor has."""
MOST_FAILURES = 3
"""Actors in a row that end before they claim the next search; then that search fails."""
SILENCE = 10.0 + BUSY_SECONDS
"""Seconds without a word of the process that supervises, after which it is started again.

A step may wait ``BUSY_SECONDS`` for the store.
"""
JOIN = 150.0
"""Seconds that it has to say its first word."""
_PAUSE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSetting:
    """What the process that supervises needs."""

    storage: str
    address: str
    """Of Ray."""
    limit: int
    """Bytes of an uploaded folder."""
    apart: bool
    """Whether scripts run under uids of their users."""
    keep: float
    """Seconds for which an uploaded folder is kept after its last search has ended."""


class Supervision:
    """A thread of the service that keeps the supervising process, and its own Ray, running."""

    def __init__(
        self,
        own: DetachedRay | None,
        start: Callable[[], ServiceSetting],
        say: Callable[[str], object],
    ) -> None:
        """``own``: the Ray that the service started; ``start`` starts it, if it does not run.

        ``say`` receives a line about each problem.
        """
        self._own = own
        self._start = start
        self._say = say
        self._said = ""
        self._nodes: tuple[ClusterNode, ...] = ()
        self._heard = -math.inf
        """When the process said something last, by ``time.monotonic``."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="supervision", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the process and the thread; searches go on."""
        self._stopped.set()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether searches can be started now."""
        return time.monotonic() - self._heard < SILENCE

    @property
    def machines(self) -> tuple[ClusterNode, ...]:
        """Those of the Ray cluster; empty while Ray does not answer."""
        return self._nodes if self.alive else ()

    def _keep(self) -> None:
        while not self._stopped.is_set():
            try:
                with _process(self._start()) as process:
                    self._listen(process)
            except (AutofitError, OSError) as error:
                self._tell(str(error))
            self._heard = -math.inf
            self._stopped.wait(_PAUSE)

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Return when the process, or the service's own Ray, has to be started again."""
        assert process.stdout is not None
        reading = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        reading.start()
        began = time.monotonic()
        while not self._stopped.wait(POLL):
            if self._own is not None and not self._own.whole():
                return self._tell("a process of Ray has ended: Ray is started again")
            silent = time.monotonic() - max(self._heard, began - SILENCE + JOIN)
            if not reading.is_alive() or silent > SILENCE:
                return self._tell("the process that starts searches is started again")
        return None

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            found = json.loads(line)
            self._nodes = from_json(found["nodes"], tuple[ClusterNode, ...])
            self._heard = time.monotonic()
            self._tell(found["said"])

    def _tell(self, line: str) -> None:
        """Say a line, if it is not what was said last."""
        if line and line != self._said:
            self._say(line)
        self._said = line


@contextlib.contextmanager
def _process(setting: ServiceSetting) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process that supervises, which ends with this one; kill it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "autofit.service.supervisor"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        try:
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(setting))
            process.stdin.flush()
            yield process
        finally:
            process.kill()


class Supervisor:
    """Starts actors for queued searches; this process has joined Ray.

    It keeps no state: an actor claims its search itself, in one transaction. So nothing is lost
    between the decision to start an actor and its first line.
    """

    def __init__(self, setting: ServiceSetting, queue: Queue) -> None:
        self._setting = setting
        self._queue = queue
        self._tidied = -math.inf
        """When uploads were deleted last, by ``time.monotonic``."""
        self._host = socket.gethostname()
        self._unclaimed: tuple[str, Any, Any, float] | None = None
        """The actor that was started last, as long as it has not claimed a search."""
        self._failures = 0
        self._patience = BIRTH

    def step(self) -> str:
        """Queue searches again that were lost, and start an actor if a search can start.

        Returns a line about what happened, or an empty one.
        """
        said = []
        if lost := self._queue.reclaim():
            said.append(f"{lost} lost searches continue")
        if late := self._queue.expire():
            said.append(f"the deadline of {late} waiting searches has passed")
        if time.monotonic() - self._tidied > TIDY:
            self._tidied = time.monotonic()
            before = datetime.now(UTC) - timedelta(seconds=self._setting.keep)
            if old := self._queue.delete_uploads(before):
                said.append(f"{old} uploaded folders are no longer needed and were deleted")
        waits, problem = self._waits()
        if not waits and self._queue.claimable(self._host):
            self._begin()
        return "; ".join([*said, *filter(None, [problem])])

    def _waits(self) -> tuple[bool, str]:
        """Return whether an actor was started that has not claimed a search yet, and a problem."""
        import ray

        if self._unclaimed is None:
            return False, ""
        runner, actor, created, since = self._unclaimed
        if self._queue.taken(runner):
            self._unclaimed, self._failures, self._patience = None, 0, BIRTH
            return False, ""
        ended, _ = ray.wait([created], timeout=0)
        if ended:
            self._unclaimed = None
            return False, self._failed(created)
        if time.monotonic() - since > (patience := self._patience):
            ray.kill(actor)
            self._unclaimed, self._patience = None, min(2 * patience, MOST_PATIENCE)
            return False, f"an actor did not start within {patience:.0f} s: another one is started"
        return True, ""

    def _failed(self, created: Any) -> str:
        """Return why an actor ended without a search; after some, end the search that is next."""
        import ray

        try:
            ray.get(created, timeout=1.0)
            return ""  # it found no search: another actor was faster
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
        self._failures += 1
        if self._failures < MOST_FAILURES:
            return f"an actor ended before it took up a search: {reason}"
        self._failures = 0
        failed = self._queue.fail_next(
            self._host, f"its process ends before it begins ({reason}): resume the search"
        )
        return f"search {failed} fails: its process ends before it begins: {reason}"

    def _begin(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        runner = uuid.uuid4().hex
        node = ray.get_runtime_context().get_node_id()
        remote: Any = ray.remote
        setting = self._setting
        actor = remote(
            num_cpus=0,
            name=runner,
            namespace=NAMESPACE,
            lifetime="detached",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )(SearchRunner).remote(
            setting.storage, setting.address, runner, setting.limit, setting.apart
        )
        self._unclaimed = runner, actor, actor.__ray_ready__.remote(), time.monotonic()


def main() -> None:
    """Supervise until the service ends, or Ray does."""
    setting: ServiceSetting = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_the_service, daemon=True).start()
    words = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray may print
    try:
        with RaySession(address=setting.address), Store(setting.storage) as store:
            _supervise(Supervisor(setting, Queue(store)), words)
    except (AutofitError, OSError, RuntimeError) as error:
        words.write(json.dumps({"nodes": [], "said": str(error).partition("\n")[0]}) + "\n")


def _supervise(supervisor: Supervisor, words: IO[str]) -> None:
    """Supervise until Ray ends; write a line at each step."""
    looked, loads = -math.inf, nodes.Loads()
    alive: list[ClusterNode] = []
    while True:
        if time.monotonic() - looked > LOOK:
            alive = loads.read(nodes.look().values())
            looked = time.monotonic()
        try:
            said = supervisor.step()
        except StorageError as error:  # the next round tries again
            said = str(error)
        words.write(json.dumps({"nodes": to_json(alive), "said": said}) + "\n")
        time.sleep(POLL)


def _end_with_the_service() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
