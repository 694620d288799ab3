"""The Ray actor that runs one rank of a training on another host. Imports no torch."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autofit.exceptions import WorkerError
from autofit.worker import meter
from autofit.worker.cluster.actor import ActorSetting, Slot, in_copied_folder
from autofit.worker.launch.child import Child, Message, python
from autofit.worker.launch.launcher import HARNESS
from autofit.worker.oom import classifier
from autofit.worker.records.trials import ChildSpec, Event

POLL = 1.0
"""Seconds after which ``hear`` returns without news, which shows that the actor is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How the process of a rank has ended."""

    returncode: int = 0
    """As in ``subprocess``."""
    output: str = ""
    """The last lines that it printed."""
    oom_kills: int = 0
    """Processes that the kernel's OOM killer ended on the host meanwhile."""
    error: str = ""
    """Why the process could not be started or heard; empty if it could."""


class RankActor(Slot):
    """The actor: runs the process of one rank, and hands its events to ``RemoteRank``.

    When the parent of the ranks or the host's Ray ends, this actor ends too. Its reaper then ends
    the rank.
    """

    def __init__(self, setting: ActorSetting) -> None:
        super().__init__(setting)
        self._child: Child | None = None
        self._events: list[Event] = []
        self._end: RankEnd | None = None
        self._news = threading.Condition()

    def start(self, spec: ChildSpec, changes: Mapping[str, str]) -> str:
        """Start the rank, and return Ray's identifier of this host.

        ``changes``: the variables that the rank needs beside those of the user and of this host.
        """
        import ray

        threading.Thread(target=self._run, args=(spec, changes), daemon=True).start()
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def hear(self, after: int) -> tuple[list[Event], RankEnd | None]:
        """Return the events but the first ``after``, and how the process has ended, if it has.

        Waits up to ``POLL`` seconds for news. It may be asked again for the same events.
        """
        with self._news:
            self._news.wait_for(lambda: len(self._events) > after or self._end, POLL)
            return self._events[after:], self._end

    def tell(self, message: Message | int) -> None:
        """Send the rank a message of its parent, or a signal; do nothing if it has ended."""
        with self._news:
            self._news.wait_for(lambda: self._child or self._end)  # it may be starting
            child = self._child if self._end is None else None
        if child is None:
            return
        if isinstance(message, int):
            child.signal(message)
        else:
            child.answer(message)

    def _run(self, spec: ChildSpec, changes: Mapping[str, str]) -> None:
        """Run the process to its end. The kernel ends it with this thread: see ``lifeline``."""
        kills = classifier.oom_kills()
        request, folder = spec.request, self._setting.folder
        environment = {**self._environment, **changes}
        if request.budget:
            environment |= meter.environment(request.device, request.budget, environment)
        if folder is not None:
            script = in_copied_folder(request.script, folder, os.getcwd())
            spec = replace(spec, request=replace(request, script=script))
        scratch = tempfile.TemporaryDirectory(dir=self._scratch, ignore_cleanup_errors=True)
        try:
            with scratch as own:
                spec = replace(spec, scratch=own)
                with Child.start(python(HARNESS), spec, environment, lone=True) as child:
                    with self._news:
                        self._child = child
                        self._news.notify_all()
                    for event in child.events():
                        with self._news:
                            self._events.append(event)
                            self._news.notify_all()
            end = RankEnd(
                returncode=child.returncode or 0,
                output=str(child.tail),
                oom_kills=classifier.oom_kills() - kills,
            )
        except (WorkerError, OSError) as error:
            end = RankEnd(returncode=1, error=str(error))
        with self._news:
            self._end = end
            self._news.notify_all()
