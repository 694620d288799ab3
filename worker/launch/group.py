"""Runs the ranks of one launch, often a single process. Imports no torch.

When one rank fails, the others are killed, because they would wait for it forever. The rank that
failed first determines the launch's result. A rank may only report that another has gone; for
``report_seconds`` seconds the rank that really failed may still report its own error.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Self, TypeVar

from autofit.worker.launch.child import EXIT_SECONDS, Child, Message, Tail, bury_orphans
from autofit.worker.launch.reaper import ProcessEntry, kill_until_gone, with_descendants
from autofit.worker.launch.tasks import Rank, RankTask
from autofit.worker.records.trials import (
    Agreed,
    Agreeing,
    Event,
    Finished,
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


R = TypeVar("R")
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank has ended; ``error`` is the exception of the thread that read its events, if any."""

    error: BaseException | None = None


def listen(
    rank: R, events: Iterator[E], received: SimpleQueue[tuple[R, E | Ended]]
) -> threading.Thread:
    """Put the events of ``rank`` into ``received``, then ``Ended``; return the thread that does."""

    def run() -> None:
        error = None
        try:
            for event in events:
                received.put((rank, event))
        except BaseException as raised:  # noqa: BLE001 - the reader of ``received`` raises it again
            error = raised
        received.put((rank, Ended(error)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


class Group:
    """The ranks of a launch; a single process is a group of one.

    ``lone`` as for ``Child``.
    """

    def __init__(
        self, ranks: Sequence[Rank], *, lone: bool = False, report_seconds: float = REPORT_SECONDS
    ) -> None:
        self.ranks = ranks
        self.speaker = ranks[0]
        """The rank that sent the last event of ``events``."""
        self.timed_out = False
        self._several = len(ranks) > 1
        self._lone = lone
        self._over = False
        """This object ended the ranks; their later events say nothing about the script."""
        self._limit: threading.Timer | None = None
        self._listeners: list[threading.Thread] = []
        self._received: SimpleQueue[tuple[Rank, Event | Ended]] = SimpleQueue()
        self._agreeing: dict[int, Agreeing] = {}
        self._finished: dict[int, Finished] = {}
        self._followers: list[tuple[Rank, Raised]] = []
        """Ranks that only reported another rank's end, with their reports."""
        self._culprit: Rank | None = None
        """The rank that failed first."""
        self._index = 0
        self._report_seconds = report_seconds
        self._timers: list[threading.Timer] = []

    @classmethod
    def start(
        cls,
        command: list[str],
        tasks: Sequence[RankTask],
        *,
        lone: bool = False,
        uid: int | None = None,
    ) -> Self:
        """Start a rank for each task, with ``command`` if it runs on this host.

        Raises ``WorkerError`` when a process cannot be started.
        """
        ranks: list[Rank] = []
        with ExitStack() as stack:
            for task in tasks:
                rank: Rank
                if task.host is None:
                    alone = lone and len(tasks) == 1
                    rank = Child.start(command, task.spec, task.environment, lone=alone, uid=uid)
                else:
                    rank = task.host.start(task.spec, task.environment)
                stack.callback(rank.end)
                ranks.append(rank)
            stack.pop_all()
        return cls(ranks, lone=lone, report_seconds=report_seconds(tasks))

    @property
    def tail(self) -> Tail:
        """The last lines of the rank that failed first; rank 0's if none failed."""
        return (self._culprit or self.ranks[0]).tail

    @property
    def returncode(self) -> int | None:
        """``Rank.returncode`` of the rank that failed first; ``None`` if none of several failed."""
        rank = self._culprit if self._several else self.ranks[0]
        return None if rank is None else rank.returncode

    @property
    def label(self) -> str:
        """Prefix of a message about the rank that failed first; empty if none of several failed."""
        return "" if self._culprit is None else self._label_of(self._culprit)

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the processes that this object started."""
        return tuple(pid for rank in self.ranks for pid in rank.pids)

    def limit(self, seconds: float | None) -> None:
        """Kill all ranks after ``seconds``; a call restarts the timer, ``None`` removes it."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        if seconds is not None:
            self._limit = self._after(seconds, self._time_out)

    def linger(self, seconds: float) -> None:
        """Give the ranks ``seconds`` to exit by themselves, then kill them."""
        self._after(seconds, lambda: [rank.kill() for rank in self.ranks])

    def answer(self, answer: Message) -> None:
        """Send every rank the answer that all of them are waiting for."""
        for child in self.ranks:
            child.answer(answer)

    def kill(self) -> bool:
        """Kill all ranks without waiting; return ``False`` if all had ended."""
        self._over = True
        return any([child.kill() for child in self.ranks])

    def end(self) -> None:
        """Kill all ranks and their descendants, and wait until they are gone."""
        for timer in self._timers:
            timer.cancel()
        self.kill()
        for listener in self._listeners:
            listener.join()
        for child in self.ranks:
            child.end()
        if self._lone:
            kill_until_gone(_orphans, _KILL_SECONDS)
            bury_orphans()

    @property
    def waiting(self) -> str:
        """Which ranks wait for which to agree, for a message about a hang; empty if none waits."""
        if not self._agreeing:
            return ""
        others = [child.rank for child in self.ranks if child.rank not in self._agreeing]
        waiting = "; ".join(f"rank {rank} is at {event.what}" for rank, event in self._sorted())
        return f"{waiting}, and waits for rank {', '.join(map(str, others))}"

    # --- events of the ranks ---------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        """Yield the events of the launch until all ranks have ended."""
        self._listeners = [listen(r, r.events(), self._received) for r in self.ranks]
        running = len(self.ranks)
        deadline: float | None = None
        while running:
            try:
                timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
                child, event = self._received.get(timeout=timeout)
            except Empty:
                deadline = None
                yield from self._blame_follower()
                continue
            if isinstance(event, Ended):
                running -= 1
                if event.error is not None:
                    raise event.error
                yield from self._has_ended(child)
            else:
                yield from self._handle(child, event)
            if self._followers and deadline is None and self._culprit is None:
                deadline = time.monotonic() + self._report_seconds
        yield from self._blame_follower()

    def _handle(self, child: Rank, event: Event) -> Iterator[Event]:
        if self._over or self._culprit is not None:
            return
        match event:
            case Agreeing():
                self._agreeing[child.rank] = event
                self._agree()
                yield from self._end_if_stuck()
            case Raised(follows=True) if self._several:
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
                if stopped or len(self._finished) == len(self.ranks):
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
        if len(self._agreeing) == len(self.ranks):
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

    def _has_ended(self, child: Rank) -> Iterator[Event]:
        """Blame a rank that ended without reporting an error or the end of its script."""
        if self._over or self._culprit is not None or child.rank in self._finished:
            return
        if child.returncode is None or any(child is each for each, _ in self._followers):
            return
        self._blame(child)
        if child.returncode == 0 and self._several:
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

    def _blame(self, child: Rank) -> None:
        """Kill the other ranks, which would wait for ``child``; let ``child`` exit by itself."""
        self._culprit = self.speaker = child
        self._after(EXIT_SECONDS, child.kill)
        for other in self.ranks:
            if other is not child:
                other.kill()

    def _labelled(self, child: Rank, event: Raised | Shortage) -> Event:
        """Return ``event`` with the rank put before its message."""
        label = self._label_of(child)
        if isinstance(event, Raised):
            return replace(event, message=label + event.message)
        found: OutOfMemory = event.out_of_memory
        return replace(event, out_of_memory=replace(found, message=label + found.message))

    def _label_of(self, child: Rank) -> str:
        return f"rank {child.rank}: " if self._several else ""

    def _after(self, seconds: float, action: Callable[[], object]) -> threading.Timer:
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), action)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)
        return timer

    def _time_out(self) -> None:
        self.timed_out = self.kill()


def report_seconds(tasks: Sequence[RankTask]) -> float:
    """Return how many seconds the failed rank has to report its error after another noticed it."""
    return REPORT_SECONDS if all(each.host is None for each in tasks) else _REMOTE_REPORT_SECONDS


def _orphans(table: dict[int, ProcessEntry]) -> set[ProcessEntry]:
    """Return this process's children, started or adopted, and their descendants."""
    roots = {process.pid for process in table.values() if process.parent == os.getpid()}
    return with_descendants(roots, table)
