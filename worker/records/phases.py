"""Where the time of a process goes: its seconds by phase."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

START = "start"
"""From the start of the process to the script's first line."""
IMPORT = "import"
"""From there until the script makes an optimizer or calls a model: imports, building the model."""
FIRST_BATCH = "first batch"
"""From there to the root's first call with gradients; includes the wait for the first batch."""
OBSERVE = "observe"
"""Steps of the script as it is."""
PROBE = "probe"
"""Chunks under plans, outside of the script's own steps."""
CONFIRM = "confirm"
"""Optimizer steps under plans."""
CHECK = "check"
"""Verification of plans, and of how a batch is split."""
COMPILE = "compile"
"""Compilation, as ``torch._dynamo`` counts it."""
DATA = "data"
"""Waiting for a loader, after the first batch."""
RAY = "Ray"
"""Opening Ray, starting actors, and sending requests to them."""
IDLE = "idle"
"""Waiting for the search's answer, such as the next plan."""
OTHER = "other"
ORDER = (
    START,
    IMPORT,
    FIRST_BATCH,
    OBSERVE,
    PROBE,
    CHECK,
    COMPILE,
    CONFIRM,
    DATA,
    RAY,
    IDLE,
    OTHER,
)
"""All phases, as they are listed."""

TOLD = frozenset({IMPORT, FIRST_BATCH, OBSERVE, PROBE, CHECK, CONFIRM})
"""Phases of a launch that a person who waits is told of."""

Seconds = tuple[tuple[str, float], ...]
"""Seconds by phase; each phase occurs once."""


class Phases:
    """Measures the seconds of a process by phase.

    Phases exclude one another: a second counts for the innermost phase only. Only the thread that
    created this object is measured.
    """

    def __init__(
        self,
        started: float | None = None,
        phase: str = START,
        tell: Callable[[str], object] = lambda phase: None,
    ) -> None:
        """``started``: when ``phase`` began, by ``time.monotonic``; by default now.

        ``tell`` receives the present phase after each change, if it is in ``TOLD``.
        """
        self._tell, self._told = tell, ""
        self._since = time.monotonic() if started is None else started
        self._stack = [phase]
        self._seconds: dict[str, float] = {}
        self._taken: Seconds = ()
        """The seconds up to the last ``take``."""
        self._compiled = 0.0
        """Compile seconds up to the last ``compiled``."""
        self._thread = threading.get_ident()

    @property
    def base(self) -> str:
        """The phase around all others."""
        return self._stack[0]

    def enter(self, phase: str, *, after: str | None = None) -> None:
        """Replace the base phase by ``phase``; with ``after``, only if that is the base phase."""
        if threading.get_ident() == self._thread and after in (None, self.base):
            self._count()
            self._stack[0] = phase
            self._changed()

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Count the seconds of this context for ``phase``, not for the phase around it."""
        waits_for_first = phase == DATA and self.base == FIRST_BATCH
        if threading.get_ident() != self._thread or waits_for_first:
            yield
            return
        self._count()
        self._stack.append(phase)
        self._changed()
        try:
            yield
        finally:
            self._count()
            self._stack.pop()
            self._changed()

    def _changed(self) -> None:
        present = self._stack[-1]
        if present in TOLD and present != self._told:
            self._told = present
            self._tell(present)

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds by phase, up to now."""
        found = dict(self._seconds)
        present = self._stack[-1]
        found[present] = found.get(present, 0.0) + time.monotonic() - self._since
        return found

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count ``seconds`` for ``target`` that were counted for ``source``; at most all of it."""
        if source == self._stack[-1]:
            self._count()
        moved = min(seconds, self._seconds.get(source, 0.0))
        if moved > 0:
            self._seconds[source] -= moved
            self._seconds[target] = self._seconds.get(target, 0.0) + moved

    def compiled(self, total: float) -> None:
        """Count the compile seconds since the last call, which belong to the present phase.

        ``total``: of the process so far.
        """
        self.move(total - self._compiled, self._stack[-1], COMPILE)
        self._compiled = total

    def take(self) -> Seconds:
        """Return the seconds since the last ``take``."""
        before, self._taken = self._taken, tuple(self.seconds().items())
        return without(self._taken, before)

    def restart(self, since: float) -> None:
        """Forget all seconds; those from ``since`` on count for the present phase."""
        self._seconds, self._taken, self._since = {}, (), since

    def _count(self) -> None:
        now, phase = time.monotonic(), self._stack[-1]
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now


def process_start() -> float:
    """Return when this process started, by ``time.monotonic``; now if the system does not say."""
    now = time.monotonic()
    try:
        stat = Path("/proc/self/stat").read_text()
        ticks = int(stat[stat.rindex(")") + 2 :].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError, IndexError):
        return now
    return now - max(0.0, age)


def total(seconds: Seconds) -> float:
    """Return the sum of all phases."""
    return sum(each for _, each in seconds)


def added(*parts: Seconds) -> Seconds:
    """Return the sum of ``parts``, phase by phase, in the order of ``ORDER``."""
    found = dict.fromkeys(ORDER, 0.0)
    for phase, seconds in chain(*parts):
        found[phase] = found.get(phase, 0.0) + seconds
    return tuple((phase, seconds) for phase, seconds in found.items() if seconds)


def without(seconds: Seconds, part: Seconds) -> Seconds:
    """Return ``seconds`` less ``part``, phase by phase, without phases of no seconds."""
    less = dict(part)
    left = ((phase, each - less.get(phase, 0.0)) for phase, each in seconds)
    return tuple((phase, each) for phase, each in left if each > 0)


def filled(seconds: Seconds, whole: float) -> Seconds:
    """Return ``seconds`` with ``other`` added, so that the sum is at least ``whole``."""
    return added(seconds, ((OTHER, max(0.0, whole - total(seconds))),))
