"""What a search tells whoever watches it: frozen notices, in order. Imports no torch.

The controller computes, a renderer (``autofit/cli``) shows; neither knows the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autofit.facts import Facts, Hardware
from autofit.plan import Plan
from autofit.worker.records.trials import Measurement, Script, TrialReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyStarted:
    """The study is known: first notice of every search."""

    study: str
    """Short identifier, eight hexadecimal digits."""
    script: Script
    hardware: Hardware
    devices: int
    """On which trials run: side by side, or together as the ranks of one."""
    budget: int
    """Bytes per device."""
    asked: bool
    """The budget was asked for with ``--memory``; else it is what the device has free."""
    allow: str
    """The highest fidelity allowed, as ``str(Fidelity)``."""
    resumed: int
    """Finished trials the study holds already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsKnown:
    """The script has shown what it is."""

    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelsLeftOut:
    """Levels the search will not try, each with its reason."""

    reasons: tuple[tuple[str, str, str], ...]
    """``(strategy, level, reason)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted:
    """A slot has turned to a plan, in a process of its own or in one that goes on."""

    slot: int
    plan: Plan
    on: str = ""
    """The card the slot has, where there are several slots: ``"GPU 2"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeMeasured:
    """One micro-batch size of a running trial was measured."""

    slot: int
    plan: Plan
    measurement: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    """A trial has its verdict and is stored."""

    number: int
    slot: int
    report: TrialReport
    best: bool
    """It is the fastest that fits so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialDropped:
    """A trial is ended before its verdict: by now, it would not be begun."""

    slot: int
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Remeasuring:
    """The fastest plan is measured again, in a fresh process."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line for people: something the search decided, and why."""

    text: str


Notice = (
    StudyStarted
    | FactsKnown
    | LevelsLeftOut
    | TrialStarted
    | SizeMeasured
    | TrialEnded
    | TrialDropped
    | Remeasuring
    | Line
)
Listener = Callable[[Notice], None]
