"""The notices that a search sends to its listener, in order. Imports no torch.

The controller sends them and ``autofit/cli`` renders them. Neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autofit.facts import Facts, Hardware
from autofit.plan import Plan
from autofit.worker.records.trials import Measurement, Script, TrialReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyStarted:
    """The study is open: the first notice of every search."""

    study: str
    """Short identifier, eight hexadecimal digits."""
    script: Script
    hardware: Hardware
    devices: int
    """Number of devices, on which trials run in parallel, or as the ranks of one trial."""
    budget: int
    """Bytes per device."""
    asked: bool
    """Whether the budget was given with ``--memory``; otherwise it is the device's free memory."""
    allow: str
    """The highest fidelity allowed, as ``str(Fidelity)``."""
    resumed: int
    """Finished trials that the study already has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsKnown:
    """A launch has learned facts about the script."""

    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelsLeftOut:
    """Levels that the search will not try, each with a reason."""

    reasons: tuple[tuple[str, str, str], ...]
    """``(strategy, level, reason)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted:
    """A trial has started on a slot, in a new process or in one that measured other plans."""

    slot: int
    plan: Plan
    on: str = ""
    """The device of the slot, such as ``"GPU 2"``; empty if there is one slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBegun:
    """A running trial has got further."""

    slot: int
    phase: str
    """What the process does now, such as ``"imports the script"``."""
    steps: int = 0
    """Optimizer steps measured since the last notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOutput:
    """The script of a running trial has written to standard output or error."""

    slot: int
    text: str
    """The last lines that its process has written. They replace those of an earlier notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeMeasured:
    """One micro-batch size of a running trial was measured."""

    slot: int
    plan: Plan
    measurement: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    """A trial has a verdict and is stored."""

    number: int
    """Its number in the store."""
    slot: int
    report: TrialReport
    best: bool
    """Whether its plan is the fastest that fits so far."""
    after: str = ""
    """What has changed the verdict of a trial that had one: ``"real steps"``, ``"the check"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialDropped:
    """A running trial is stopped, because the cost model no longer expects it to win."""

    slot: int
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Remeasuring:
    """The confirmation run of a plan has started, in a new process."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """The confirmation run of a plan was measured."""

    number: int
    """Its number in the store."""
    plan: Plan
    measurement: Measurement
    searched: Measurement | None
    """The figures of the search; ``None`` if the search did not measure the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of text: a decision of the search, with its reason."""

    text: str


Notice = (
    StudyStarted
    | FactsKnown
    | LevelsLeftOut
    | TrialStarted
    | PhaseBegun
    | NewOutput
    | SizeMeasured
    | TrialEnded
    | TrialDropped
    | Remeasuring
    | Confirmed
    | Line
)
Listener = Callable[[Notice], None]
