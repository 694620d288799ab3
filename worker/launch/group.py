"""Runs the several ranks of one launch like one child process. Imports no torch.

When one rank fails, the others are killed, because they would wait for it forever. The rank that
failed first determines the launch's result. A rank may only report that another has gone; for
``report_seconds`` seconds the rank that really failed may still report its own error.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from autofit.worker.launch.child import EXIT_SECONDS, Child, Tail, bury_orphans, command_of
from autofit.worker.launch.reaper import Process, kill_until_gone, with_descendants
from autofit.worker.records.trials import (
    Agreed,
    Agreeing,
    Answer,
    ChildSpec,
    Event,
    Finished,
    LaunchRequest,
    OutOfMemory,
    PlanEnded,
    PlanStarted,
    Raised,
    Shortage,
)

REPORT_SECONDS = 2.0
"""Seconds that the failed rank has to report its error after another noticed the failure."""
_REMOTE_REPORT_SECONDS = 12.0
"""The same with several hosts: Ray may need as long to notice that a host is gone."""
_KILL_SECONDS = 10.0
"""Seconds to wait for killed processes to disappear."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """A rank has ended; ``error`` is the exception of the thread that read its events, if any."""

    error: BaseException | None = None


class Group:
    """Ranks 0 to ``len(environments) - 1`` of a launch, with the interface of ``Child``.

    ``lone`` as for ``Child``. Raises ``WorkerError`` when the system cannot start a process.
    """

    def __init__(
        self,
        command: list[str],
        specs: Sequence[ChildSpec],
        environments: Sequence[Mapping[str, str]],
        *,
        lone: bool = False,
        uid: int | None = None,
    ) -> None:
        self.timed_out = False
        self._lone = lone
        self._over = False
        """This object ended the ranks; their later events say nothing about the script."""
        self._limit: threading.Timer | None = None
        self._listeners: list[threading.Thread] = []
        self._received: SimpleQueue[tuple[Child, Event | _Ended]] = SimpleQueue()
        self._agreeing: dict[int, Agreeing] = {}
        self._finished: dict[int, Finished] = {}
        self._followers: list[tuple[Child, Raised]] = []
        """Ranks that only reported another rank's end, with their reports."""
        self._culprit: Child | None = None
        """The rank that failed first."""
        self._index = 0
        self._report_seconds = report_seconds(specs)
        self._ranks: list[Child] = []
        with ExitStack() as stack:
            for rank, (spec, environment) in enumerate(zip(specs, environments, strict=True)):
                program = command_of(spec, command)
                child = Child.start(program, replace(spec, rank=rank), environment, uid=uid)
                self._ranks.append(stack.enter_context(child))
            stack.pop_all()
        self.speaker = self._ranks[0]
        """The rank that sent the last event of ``events``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    # --- the interface of ``Child`` --------------------------------------------------------

    @property
    def tail(self) -> Tail:
        """The last lines of the rank that failed first; rank 0's if none failed."""
        return (self._culprit or self._ranks[0]).tail

    @property
    def returncode(self) -> int | None:
        """``Child.returncode`` of the rank that failed first; ``None`` if none failed."""
        return None if self._culprit is None else self._culprit.returncode

    @property
    def label(self) -> str:
        """Prefix of a message about the rank that failed first; empty if none failed."""
        return "" if self._culprit is None else f"rank {self._culprit.rank}: "

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the processes that this object started."""
        return tuple(child.pid for child in self._ranks)

    def limit(self, seconds: float | None) -> None:
        """Kill all ranks after ``seconds``; a call restarts the timer, ``None`` removes it."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        if seconds is not None:
            self._limit = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._time_out)
            self._limit.daemon = True
            self._limit.start()

    def linger(self, seconds: float) -> None:
        """Give the ranks ``seconds`` to exit by themselves, then kill them."""
        for child in self._ranks:
            child.linger(seconds)

    def answer(self, answer: Answer | Agreed | LaunchRequest) -> None:
        """Send every rank the answer that all of them are waiting for."""
        for child in self._ranks:
            child.answer(answer)

    def kill(self) -> bool:
        """Kill all ranks without waiting; return ``False`` if all had ended."""
        self._over = True
        return any([child.kill() for child in self._ranks])

    def end(self) -> None:
        """Kill all ranks and their descendants, and wait until they are gone."""
        self.limit(None)
        self.kill()
        for listener in self._listeners:
            listener.join()
        for child in self._ranks:
            child.end()
        if self._lone:
            kill_until_gone(_orphans, _KILL_SECONDS)
            bury_orphans()

    @property
    def waiting(self) -> str:
        """Which ranks wait for which to agree, for a message about a hang; empty if none waits."""
        if not self._agreeing:
            return ""
        others = [child.rank for child in self._ranks if child.rank not in self._agreeing]
        waiting = "; ".join(f"rank {rank} is at {event.what}" for rank, event in self._sorted())
        return f"{waiting}, and waits for rank {', '.join(map(str, others))}"

    # --- events of the ranks ---------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        """Send the spec to each rank, then yield the events of the launch until all have ended."""
        for child in self._ranks:
            listener = threading.Thread(target=self._listen, args=(child,), daemon=True)
            listener.start()
            self._listeners.append(listener)
        running = len(self._ranks)
        deadline: float | None = None
        while running:
            try:
                timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
                child, event = self._received.get(timeout=timeout)
            except Empty:
                deadline = None
                yield from self._blame_follower()
                continue
            if isinstance(event, _Ended):
                running -= 1
                if event.error is not None:
                    raise event.error
                yield from self._has_ended(child)
            else:
                yield from self._handle(child, event)
            if self._followers and deadline is None and self._culprit is None:
                deadline = time.monotonic() + self._report_seconds
        yield from self._blame_follower()

    def _listen(self, child: Child) -> None:
        error = None
        try:
            for event in child.events():
                self._received.put((child, event))
        except BaseException as raised:  # noqa: BLE001 - ``events`` raises it again
            error = raised
        self._received.put((child, _Ended(error)))

    def _handle(self, child: Child, event: Event) -> Iterator[Event]:
        if self._over or self._culprit is not None:
            return
        match event:
            case Agreeing():
                self._agreeing[child.rank] = event
                self._agree()
                yield from self._end_if_stuck()
            case Raised(follows=True):
                self._followers.append((child, event))
            case Raised():
                self._blame(child)
                yield self._labelled(child, event)
            case PlanEnded() if child.rank > 0:  # it exits whatever the others do
                self._blame(child)
                yield event
            case Finished():
                self._finished[child.rank] = event
                stopped = event.stopped and child.rank == 0
                if stopped or len(self._finished) == len(self._ranks):
                    self._over = stopped
                    yield self._finished[0]
                else:
                    yield from self._end_if_stuck()
            case Shortage():
                self.speaker = child
                yield self._labelled(child, event)
            case _:
                if isinstance(event, PlanStarted):
                    self._index = event.index
                self.speaker = child
                yield event

    def _agree(self) -> None:
        if len(self._agreeing) == len(self._ranks):
            agreeing = tuple(each for _, each in self._sorted())
            self._agreeing.clear()
            self.answer(Agreed(said=agreeing))

    def _end_if_stuck(self) -> Iterator[Event]:
        """End the launch if ranks wait to agree with a rank that was already stopped."""
        stopped = next((event for event in self._finished.values() if event.stopped), None)
        if stopped is not None and self._agreeing:
            self._over = True
            yield stopped

    def _sorted(self) -> list[tuple[int, Agreeing]]:
        return sorted(self._agreeing.items())

    def _has_ended(self, child: Child) -> Iterator[Event]:
        """Blame a rank that ended without reporting an error or the end of its script."""
        if self._over or self._culprit is not None or child.rank in self._finished:
            return
        if child.returncode is None or any(child is each for each, _ in self._followers):
            return
        self._blame(child)
        if child.returncode == 0:
            message = f"rank {child.rank} ended by itself (exit code 0), and the others went on"
            yield Raised(
                index=self._index, kind="error", message=message, traceback=str(child.tail)
            )

    def _blame_follower(self) -> Iterator[Event]:
        """Yield the first report of another rank's end if no rank reported an error of its own."""
        if self._followers and self._culprit is None and not self._over:
            child, event = self._followers[0]
            self._blame(child)
            before = "".join(f"after rank {rank} had ended: " for rank in self._finished)
            yield self._labelled(child, replace(event, message=before + event.message))

    def _blame(self, child: Child) -> None:
        """Kill the other ranks, which would wait for ``child``; let ``child`` exit by itself."""
        self._culprit = self.speaker = child
        child.linger(EXIT_SECONDS)
        for other in self._ranks:
            if other is not child:
                other.kill()

    def _labelled(self, child: Child, event: Raised | Shortage) -> Event:
        """Return ``event`` with the rank put before its message."""
        label = f"rank {child.rank}: "
        if isinstance(event, Raised):
            return replace(event, message=label + event.message)
        found: OutOfMemory = event.out_of_memory
        return replace(event, out_of_memory=replace(found, message=label + found.message))

    def _time_out(self) -> None:
        self.timed_out = self.kill()


def report_seconds(specs: Sequence[ChildSpec]) -> float:
    """Return how many seconds the failed rank has to report its error after another noticed it."""
    return REPORT_SECONDS if all(each.host is None for each in specs) else _REMOTE_REPORT_SECONDS


def _orphans(table: dict[int, Process]) -> set[Process]:
    """Return this process's children, started or adopted, and their descendants."""
    roots = {process.pid for process in table.values() if process.parent == os.getpid()}
    return with_descendants(roots, table)
