"""The thread of a service that starts an actor for each search, and notes actors that were lost."""

from __future__ import annotations

import math
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from autofit.exceptions import AutofitError
from autofit.service.runner import NAMESPACE, Runner
from autofit.storage import Queue, Store

POLL = 0.5
"""Seconds between two looks at the queue."""
TIDY = 60.0
"""Seconds between two looks for uploads that are no longer needed."""
BIRTH = 120.0
"""Seconds after which an actor that has claimed nothing is no longer waited for."""


class Supervisor:
    """Starts actors for queued searches until ``stop``; this process has joined Ray.

    It keeps no state: an actor claims its search itself, in one transaction. So nothing is lost
    between the decision to start an actor and its first line.
    """

    def __init__(
        self,
        storage: str,
        address: str,
        limit: int,
        apart: bool,
        keep: float,
        say: Callable[[str], object],
    ) -> None:
        """``limit``: bytes of an uploaded folder; ``apart``: run scripts under uids of their users.

        ``keep``: seconds for which an uploaded folder is kept after its last search has ended.
        ``say`` receives a line about each problem.
        """
        self._storage = storage
        self._address = address
        self._limit = limit
        self._apart = apart
        self._keep = timedelta(seconds=keep)
        self._tidied = -math.inf
        """When uploads were deleted last, by ``time.monotonic``."""
        self._say = say
        self._host = socket.gethostname()
        self._unclaimed: tuple[str, Any, float] | None = None
        """The actor that was started last, as long as it has not claimed a search."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; searches go on."""
        self._stopped.set()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _watch(self) -> None:
        said = ""
        with Store(self._storage) as store:
            queue = Queue(store)
            while not self._stopped.wait(POLL):
                try:
                    self._step(queue)
                    said = ""
                except (AutofitError, ConnectionError) as error:
                    if said != str(error):
                        said = str(error)
                        self._say(said)

    def _step(self, queue: Queue) -> None:
        """Queue searches again that were lost, and start an actor if a search can start."""
        if lost := queue.reclaim():
            self._say(f"{lost} lost searches continue")
        if late := queue.expire():
            self._say(f"the deadline of {late} waiting searches has passed")
        if time.monotonic() - self._tidied > TIDY:
            self._tidied = time.monotonic()
            if old := queue.delete_uploads(datetime.now(UTC) - self._keep):
                self._say(f"{old} uploaded folders are no longer needed and were deleted")
        if not self._waits(queue) and queue.claimable(self._host):
            self._begin()

    def _waits(self, queue: Queue) -> bool:
        """Return whether an actor was started that has not claimed a search yet."""
        import ray

        if self._unclaimed is None:
            return False
        runner, created, since = self._unclaimed
        ended, _ = ray.wait([created], timeout=0)
        late = time.monotonic() - since > BIRTH
        if ended or late or queue.taken(runner):
            self._unclaimed = None
        return self._unclaimed is not None

    def _begin(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        runner = uuid.uuid4().hex
        node = ray.get_runtime_context().get_node_id()
        remote: Any = ray.remote
        actor = remote(
            num_cpus=0,
            name=runner,
            namespace=NAMESPACE,
            lifetime="detached",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )(Runner).remote(self._storage, self._address, runner, self._limit, self._apart)
        self._unclaimed = runner, actor.__ray_ready__.remote(), time.monotonic()
