"""The launches under way, as the controller keeps track of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from autofit.plan import Plan
from autofit.storage import Purpose, TrialRecord
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import Asking, TrialReport, Verdict

MOMENT = 2.0
"""Seconds after a report within which a launch asks for another plan, unless its process ends."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A trial that cannot be judged before another run has shown what the script does itself."""

    trial: TrialRecord
    report: TrialReport
    """As the trial ended; not judged yet."""
    trace: Trace | None = None
    drifted: bool = False
    """It seems to train something else; else it failed."""


@dataclass(slots=True)
class RunningLaunch:
    """A launch under way."""

    trials: list[TrialRecord]
    """One a plan it was given, in order."""
    reported: int = 0
    traces: dict[int, Trace] = field(default_factory=dict)
    """Of the first steps, by the index of the plan they were taken under."""
    doubted: Doubt | None = None
    """The trial in doubt."""
    spoilt: bool = False
    """A plan may have left bad weights behind: the launch gets no other."""
    steps: int = 0
    """Where this launch runs the reference for the doubted trial's sake: for how long."""
    number: int = 0
    """Its number in the study."""
    ahead: Plan = field(default_factory=Plan)
    """What is fixed in it from its start, also where that came before there was a plan for it."""
    spare: bool = False
    """Nothing has run in it: it waits for the last word."""
    asking: Asking | None = None
    """It waits for a plan."""
    over: bool = False
    """It has been told that there is no other, or is ended, and ends."""
    killed: bool = False
    """Its process was killed from outside: what ran there is tried again."""
    refused: set[int] = field(default_factory=set)
    """Indices of the plans that it did not take."""
    heard: float = 0.0
    """When it reported last."""

    @property
    def fixed(self) -> Plan:
        """What the plan to come must follow."""
        taken = [t.plan.fixed for i, t in enumerate(self.trials) if i not in self.refused]
        return taken[-1] if taken else self.ahead

    @property
    def about_to_ask(self) -> bool:
        """Whether it has measured what it was given, and will ask for more in a moment."""
        done = 0 < len(self.trials) == self.reported and not (self.over or self.asking)
        return done and time.monotonic() - self.heard < MOMENT

    @property
    def runs(self) -> bool:
        """Whether a plan of the search is being measured, and nothing has ended it."""
        ended = self.over or self.doubted is not None or self.purpose is not Purpose.SEARCH
        return len(self.trials) > self.reported and not ended

    def note(self, report: TrialReport) -> None:
        """Note that a plan is done."""
        self.reported, self.heard = self.reported + 1, time.monotonic()
        if report.verdict is Verdict.REFUSED:
            self.refused.add(report.index)

    @property
    def purpose(self) -> Purpose:
        """What its trials are for."""
        return self.trials[0].purpose if self.trials else Purpose.SEARCH

    def doubt(self, doubt: Doubt) -> None:
        """Put a trial off until the launch has ended."""
        self.doubted, self.spoilt = doubt, True


class RunningLaunches(dict[int, RunningLaunch]):
    """The launches under way, by their slots."""

    @property
    def about_to_ask(self) -> bool:
        """Whether one will ask for a plan in a moment, which then needs no start."""
        return any(launch.about_to_ask for launch in self.values())

    @property
    def ending(self) -> bool:
        """Whether a slot is about to be free."""
        return any(launch.over and launch.doubted is None for launch in self.values())

    @property
    def waiting(self) -> dict[int, RunningLaunch]:
        """Those that wait for a plan."""
        return {slot: launch for slot, launch in self.items() if launch.asking is not None}

    @property
    def busy(self) -> bool:
        """Whether one runs, of which something may be learned."""
        return any(launch.asking is None and not launch.over for launch in self.values())


def in_turn(plans: Iterable[Plan]) -> Callable[[Plan | None], Plan | None]:
    """Return what proposes each of ``plans`` once, and nothing after."""
    left = iter(list(plans))
    return lambda fixed: next(left, None)
