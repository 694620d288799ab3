"""Modules as the harness holds them, with nothing that runs a script around them."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from torch import nn

from autofit.plan import Plan
from autofit.worker.harness.batch.chunked_root import OnShortage
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.session.root import HarnessRoot, RunPolicy
from autofit.worker.records.trials import LaunchRequest, Proven, Script


def a_run(*plans: Plan, ranks: int = 1, proven: tuple[Proven, ...] = ()) -> LaunchRequest:
    """Return what a real run is asked: its plan, then what it may fall back to."""
    return LaunchRequest(
        script=Script(target="train.py", cwd="/"),
        plans=plans,
        device="cpu",
        budget=0,
        timeout=60.0,
        ranks=ranks,
        proven=proven,
    )


T = TypeVar("T")


class Bystander:
    """Takes every notice of the seams, and runs the backward passes it is given."""

    def __getattr__(self, name: str) -> Any:
        """Return a notice's taker."""
        return lambda *args: args[-1]() if name in ("backward", "grad") else None


class Rooted:
    """Makes the harness's roots of modules."""

    def __init__(self) -> None:
        self._calls = Calls()
        self._made: list[HarnessRoot] = []

    def __call__(
        self,
        module: nn.Module,
        shortage: OnShortage = lambda *_: False,
        policy: RunPolicy | None = None,
        /,
        **levels: str,
    ) -> HarnessRoot:
        """Return a module's root, under a plan of these levels.

        ``shortage``: tells whether to go on with smaller chunks where memory runs out.
        """
        root = HarnessRoot(module, Seams(Bystander()), self._calls, shortage, policy=policy)
        self._made.append(root)
        if levels:
            root.apply(Plan.of(levels))
        return root

    def take_back(self) -> None:
        """Leave all modules as they were."""
        while self._made:
            self._made.pop().take_back()
        self._calls.clear()


class Notes(Generic[T]):
    """What a test notes of calls, out of the harness's reach: it puts the state of models back."""

    def __init__(self) -> None:
        self._noted: SimpleQueue[T] = SimpleQueue()

    def append(self, note: T) -> None:
        """Take a note."""
        self._noted.put(note)

    def __iter__(self) -> Iterator[T]:
        """Yield the notes in their order."""
        notes = [self._noted.get() for _ in range(len(self))]
        for note in notes:
            self._noted.put(note)
        return iter(notes)

    def __eq__(self, other: object) -> bool:
        """Return whether the notes are those of a list."""
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        """Return how many there are."""
        return self._noted.qsize()

    def clear(self) -> None:
        """Forget them."""
        while len(self):
            self._noted.get()
