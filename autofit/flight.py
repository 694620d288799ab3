"""A launch under way, as the controller keeps track of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from autofit.plan import Plan
from autofit.storage import Purpose, TrialRecord
from autofit.worker.records import Asking, TrialReport
from autofit.worker.traces import Trace


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
class Flight:
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
    launch: int = 0
    """Its number in the study."""
    ahead: Plan = field(default_factory=Plan)
    """What is fixed in a launch that was started before there was a plan for it."""
    spare: bool = False
    """It was started ahead for the last word, and waits as long as the search does."""
    asking: Asking | None = None
    """It waits for a plan."""

    @property
    def fixed(self) -> Plan:
        """What all its plans share."""
        return self.trials[0].plan.fixed if self.trials else self.ahead

    @property
    def purpose(self) -> Purpose:
        """What its trials are for."""
        return self.trials[0].purpose if self.trials else Purpose.SEARCH

    def doubt(self, doubt: Doubt) -> None:
        """Put a trial off until the launch has ended."""
        self.doubted, self.spoilt = doubt, True


def in_turn(plans: Iterable[Plan]) -> Callable[[Plan | None], Plan | None]:
    """Return what proposes each of ``plans`` once, and nothing after."""
    left = iter(list(plans))
    return lambda fixed: next(left, None)
