"""The state of the running launches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from autofit.plan import Plan
from autofit.storage import Purpose, TrialRecord
from autofit.worker.records.phases import OTHER, RAY, Seconds, added, total, without
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import Asking, LaunchEnded, Stage, TrialReport, Verdict

NEXT_REQUEST_SECONDS = 2.0
"""Seconds after its last report in which a launch is expected to ask for another plan."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A trial whose verdict waits for another run of the reference."""

    trial: TrialRecord
    report: TrialReport
    """The trial's report, without a final verdict."""
    trace: Trace | None = None
    drifted: bool = False
    """Whether its training differs from the reference; otherwise the trial failed."""


@dataclass(slots=True)
class RunningLaunch:
    """The state of a running launch."""

    trials: list[TrialRecord]
    """Its trials, in order: one for each plan that it was given."""
    reported: int = 0
    """Number of trials that have reported."""
    stages: dict[int, Stage] = field(default_factory=dict)
    """What it does with a trial that has ended before: real steps, or the check."""
    traces: dict[int, Trace] = field(default_factory=dict)
    """Traces of first steps, by the index of the plan."""
    doubted: Doubt | None = None
    """The trial whose verdict waits for another run of the reference."""
    steps: int = 0
    """Steps to run, if this launch runs the reference again; otherwise 0."""
    number: int = 0
    """Its number in the study."""
    ahead: Plan = field(default_factory=Plan)
    """The levels fixed at its start, which may precede its first plan."""
    spare: bool = False
    """Whether it is kept idle for the final confirmation."""
    asking: Asking | None = None
    """Its request for a plan; ``None`` while it does not wait for one."""
    over: bool = False
    """Whether it was told to end."""
    killed: bool = False
    """Whether its process was killed from outside. Its plan is then tried again."""
    refused: set[int] = field(default_factory=set)
    """Indices of the plans that it refused."""
    stepped: bool = False
    """Whether its process has measured steps. Its host memory is then near its peak."""
    beside: Plan | None = None
    """The levels that act at the start of the process beside it; ``None`` if it was not asked for.
    """
    last_report: float = 0.0
    """Time of its last report, by ``time.monotonic``."""
    submitted: float = field(default_factory=time.monotonic)
    """When it was submitted, by ``time.monotonic``."""
    of_trials: Seconds = ()
    """Seconds of its trials by phase."""

    @property
    def fixed(self) -> Plan:
        """The fixed levels that its next plan must have (``Plan.follows``)."""
        taken = [t.plan.fixed for i, t in enumerate(self.trials) if i not in self.refused]
        return taken[-1] if taken else self.ahead

    @property
    def about_to_ask(self) -> bool:
        """Whether all its trials have reported and it is expected to ask for a plan."""
        done = 0 < len(self.trials) == self.reported and not (self.over or self.asking)
        return done and time.monotonic() - self.last_report < NEXT_REQUEST_SECONDS

    @property
    def runs(self) -> bool:
        """Whether it measures a plan of the search and was not told to end."""
        ended = self.over or self.doubted is not None or self.purpose is not Purpose.SEARCH
        return len(self.trials) > self.reported and not ended

    def note(self, report: TrialReport) -> None:
        """Record the report of its current plan."""
        self.reported, self.last_report = self.reported + 1, time.monotonic()
        self.of_trials = added(self.of_trials, report.seconds_by_phase)
        if report.verdict is Verdict.REFUSED:
            self.refused.add(report.index)

    def own_seconds(self, ended: LaunchEnded | None = None) -> Seconds:
        """Return its seconds outside of its trials; without ``ended`` it is lost, or ends now."""
        whole = time.monotonic() - self.submitted
        if ended is None:
            return ((OTHER, max(0.0, whole - total(self.of_trials))),)
        on_the_way = ((RAY, max(0.0, whole - ended.seconds)),)
        return added(without(ended.seconds_by_phase, self.of_trials), on_the_way)

    @property
    def purpose(self) -> Purpose:
        """The purpose of its trials."""
        return self.trials[0].purpose if self.trials else Purpose.SEARCH


class RunningLaunches(dict[int, RunningLaunch]):
    """The running launches, by slot."""

    @property
    def about_to_ask(self) -> bool:
        """Whether a launch is expected to ask for a plan, which then needs no new process."""
        return any(launch.about_to_ask for launch in self.values())

    @property
    def ending(self) -> bool:
        """Whether a launch is ending, so that its slot becomes free."""
        return any(launch.over and launch.doubted is None for launch in self.values())

    @property
    def waiting(self) -> dict[int, RunningLaunch]:
        """The launches that wait for a plan."""
        return {slot: launch for slot, launch in self.items() if launch.asking is not None}

    @property
    def busy(self) -> bool:
        """Whether a launch measures a plan."""
        return any(launch.asking is None and not launch.over for launch in self.values())


def one_by_one(plans: Iterable[Plan]) -> Callable[[], Plan | None]:
    """Return a function that proposes each of ``plans`` once, and then ``None``."""
    left = iter(list(plans))
    return lambda: next(left, None)
