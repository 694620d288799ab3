"""The processes of one launch as one: the parent's handle of several ranks. Imports no torch.

Whatever ends one rank ends all of them at once, so that nobody waits for a dead one. The first to
fail decides what the launch came to; one that only noticed another's end has to wait a moment.
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

from autofit.worker.launch.child import LAST_WORDS, Child, Tail, bury_orphans
from autofit.worker.launch.reaper import Process, kill_until_gone, with_descendants
from autofit.worker.records.trials import (
    Agreed,
    Agreeing,
    Answer,
    ChildSpec,
    Event,
    Finished,
    OutOfMemory,
    PlanEnded,
    PlanStarted,
    Raised,
    Shortage,
)

HEARING = 2.0
"""Seconds in which the true culprit may still speak, once a rank has said that another is gone."""
_PATIENCE = 10.0
"""Seconds given to killed processes to be gone."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """A rank has ended; ``error`` is what its listener died of, if it did."""

    error: BaseException | None = None


class Group:
    """Ranks 0 to ``len(environments) - 1`` of a launch, used as a ``Child`` is.

    ``lone`` as for ``Child``. Starting one raises ``WorkerError`` where the system refuses.
    """

    def __init__(
        self,
        command: list[str],
        spec: ChildSpec,
        environments: Sequence[Mapping[str, str]],
        *,
        lone: bool = False,
    ) -> None:
        self.timed_out = False
        self._lone = lone
        self._over = False
        """Ended from here: what is said after that says nothing of the script."""
        self._limit: threading.Timer | None = None
        self._listeners: list[threading.Thread] = []
        self._heard: SimpleQueue[tuple[Child, Event | _Ended]] = SimpleQueue()
        self._agreeing: dict[int, Agreeing] = {}
        self._finished: dict[int, Finished] = {}
        self._mourning: list[tuple[Child, Raised]] = []
        """Ranks that said no more than that another is gone, and what they said."""
        self._culprit: Child | None = None
        """The rank that failed first."""
        self._index = 0
        self._ranks: list[Child] = []
        with ExitStack() as stack:
            for rank, environment in enumerate(environments):
                child = Child(command, replace(spec, rank=rank), environment)
                self._ranks.append(stack.enter_context(child))
            stack.pop_all()
        self.speaker = self._ranks[0]
        """Who said what ``events`` has yielded last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    # --- what ``Child`` has too ------------------------------------------------------------

    @property
    def tail(self) -> Tail:
        """The last lines of the rank that failed first; of the first one where none did."""
        return (self._culprit or self._ranks[0]).tail

    @property
    def returncode(self) -> int | None:
        """As ``Child`` has it, of the rank that failed first; ``None`` where none did."""
        return None if self._culprit is None else self._culprit.returncode

    @property
    def label(self) -> str:
        """The rank that failed first, to be put before what is said of it; maybe nothing."""
        return "" if self._culprit is None else f"rank {self._culprit.rank}: "

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes started from here."""
        return tuple(child.pid for child in self._ranks)

    def limit(self, seconds: float | None) -> None:
        """Kill all after ``seconds``, counted anew each time; ``None`` for as long as it takes."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        if seconds is not None:
            self._limit = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._time_out)
            self._limit.daemon = True
            self._limit.start()

    def linger(self, seconds: float) -> None:
        """Give the ranks ``seconds`` to end by themselves, then kill them."""
        for child in self._ranks:
            child.linger(seconds)

    def answer(self, answer: Answer | Agreed) -> None:
        """Answer every rank; all of them wait for it."""
        for child in self._ranks:
            child.answer(answer)

    def kill(self) -> bool:
        """Kill all ranks at once, without waiting; ``False`` if all had ended."""
        self._over = True
        return any([child.kill() for child in self._ranks])

    def end(self) -> None:
        """Kill all ranks and everything they have started, wait until they are gone."""
        self.limit(None)
        self.kill()
        for listener in self._listeners:
            listener.join()
        for child in self._ranks:
            child.end()
        if self._lone:
            kill_until_gone(_orphans, _PATIENCE)
            bury_orphans()

    @property
    def waiting(self) -> str:
        """Who waits for whom to agree: what there is to say of ranks that hang; maybe nothing."""
        if not self._agreeing:
            return ""
        others = [child.rank for child in self._ranks if child.rank not in self._agreeing]
        there = "; ".join(f"rank {rank} is at {said.what}" for rank, said in self._sorted())
        return f"{there}, and waits for rank {', '.join(map(str, others))}"

    # --- what is heard ---------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        """Hand the spec to each rank, then yield what they have to say as one, until all ended."""
        for child in self._ranks:
            listener = threading.Thread(target=self._listen, args=(child,), daemon=True)
            listener.start()
            self._listeners.append(listener)
        running = len(self._ranks)
        until: float | None = None
        while running:
            try:
                timeout = None if until is None else max(0.0, until - time.monotonic())
                child, said = self._heard.get(timeout=timeout)
            except Empty:
                until = None
                yield from self._mourned()
                continue
            if isinstance(said, _Ended):
                running -= 1
                if said.error is not None:
                    raise said.error
                yield from self._has_ended(child)
            else:
                yield from self._hear(child, said)
            if self._mourning and until is None and self._culprit is None:
                until = time.monotonic() + HEARING
        yield from self._mourned()

    def _listen(self, child: Child) -> None:
        error = None
        try:
            for event in child.events():
                self._heard.put((child, event))
        except BaseException as raised:  # noqa: BLE001 - raised again where it is heard
            error = raised
        self._heard.put((child, _Ended(error)))

    def _hear(self, child: Child, said: Event) -> Iterator[Event]:
        if self._over or self._culprit is not None:
            return
        match said:
            case Agreeing():
                self._agreeing[child.rank] = said
                self._agree()
                yield from self._left_waiting()
            case Raised(follows=True):
                self._mourning.append((child, said))
            case Raised():
                self._blame(child)
                yield self._labelled(child, said)
            case PlanEnded() if child.rank > 0:  # it leaves, whatever the others do
                self._blame(child)
                yield said
            case Finished():
                self._finished[child.rank] = said
                stopped = said.stopped and child.rank == 0
                if stopped or len(self._finished) == len(self._ranks):
                    self._over = stopped
                    yield self._finished[0]
                else:
                    yield from self._left_waiting()
            case Shortage():
                self.speaker = child
                yield self._labelled(child, said)
            case _:
                if isinstance(said, PlanStarted):
                    self._index = said.index
                self.speaker = child
                yield said

    def _agree(self) -> None:
        if len(self._agreeing) == len(self._ranks):
            said = tuple(each for _, each in self._sorted())
            self._agreeing.clear()
            self.answer(Agreed(said=said))

    def _left_waiting(self) -> Iterator[Event]:
        """End the launch where others wait for a rank that was stopped alone: it never comes."""
        stopped = next((said for said in self._finished.values() if said.stopped), None)
        if stopped is not None and self._agreeing:
            self._over = True
            yield stopped

    def _sorted(self) -> list[tuple[int, Agreeing]]:
        return sorted(self._agreeing.items())

    def _has_ended(self, child: Child) -> Iterator[Event]:
        """Blame a rank that went without a word, where the others need it."""
        if self._over or self._culprit is not None or child.rank in self._finished:
            return
        if child.returncode is None or any(child is mourner for mourner, _ in self._mourning):
            return
        self._blame(child)
        if child.returncode == 0:
            message = f"rank {child.rank} ended by itself (exit code 0), and the others went on"
            yield Raised(
                index=self._index, kind="error", message=message, traceback=str(child.tail)
            )

    def _mourned(self) -> Iterator[Event]:
        """Take a rank that lost another at its word: nobody has said more."""
        if self._mourning and self._culprit is None and not self._over:
            child, said = self._mourning[0]
            self._blame(child)
            before = "".join(f"after rank {rank} had ended: " for rank in self._finished)
            yield self._labelled(child, replace(said, message=before + said.message))

    def _blame(self, child: Child) -> None:
        """End the others at once, who would wait for it; it may end by itself."""
        self._culprit = self.speaker = child
        child.linger(LAST_WORDS)
        for other in self._ranks:
            if other is not child:
                other.kill()

    def _labelled(self, child: Child, said: Raised | Shortage) -> Event:
        """Return what was said with the rank before its message."""
        label = f"rank {child.rank}: "
        if isinstance(said, Raised):
            return replace(said, message=label + said.message)
        found: OutOfMemory = said.out_of_memory
        return replace(said, out_of_memory=replace(found, message=label + found.message))

    def _time_out(self) -> None:
        self.timed_out = self.kill()


def _orphans(table: dict[int, Process]) -> set[Process]:
    """Pick what this process has started or adopted, and all that descends from it."""
    roots = {process.pid for process in table.values() if process.parent == os.getpid()}
    return with_descendants(roots, table)
