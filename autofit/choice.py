"""Which plan to measure next, and when to stop: what the cost model promises, weighed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autofit.costmodel import CostModel
from autofit.plan import Plan
from autofit.results import fits
from autofit.storage import TrialRecord
from autofit.strategies import Facts

GAIN = 0.02
"""A plan that is not faster than the best by this share is not worth finding."""
LIKELY = 0.1
"""A plan is measured when it gains that much with at least this probability."""
LEAVE = 2.0
"""A plan of another launch must promise this much more than one that can run in the present one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What measuring a plan promises."""

    plan: Plan
    gain: float
    """Expected gain in speed over the best, as a share, counted only where it is one."""
    chance: float
    """Probability that it fits and is faster than the best by more than ``GAIN``."""
    fits: float
    """Probability that it fits."""

    @property
    def worthwhile(self) -> bool:
        """Whether it is likely enough to win."""
        return self.chance >= LIKELY


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that a choice depends on."""

    candidates: tuple[Plan, ...]
    """Plans that were not tried."""
    finished: tuple[TrialRecord, ...]
    flying: tuple[Plan, ...] = ()
    """Plans that are being measured."""
    facts: Facts | None
    budget: int
    cuda: bool
    fixed: Plan | None = None
    """What the launch that asks has in common (``Plan.fixed``); ``None`` for a new launch."""

    @property
    def best(self) -> float | None:
        """Step seconds of the fastest plan that fits; ``None`` before there is one."""
        fitting = [trial.measurement for trial in self.finished if fits(trial, self.budget)]
        return min((each.seconds for each in fitting if each is not None), default=None)


def prospects(situation: Situation) -> list[Prospect]:
    """Return what each candidate promises, the most promising first.

    Before anything fits, every plan that may fit is a gain. A plan in flight counts with what it
    may come to, draw by draw.
    """
    candidates, best = situation.candidates, situation.best
    if not candidates:
        return []
    model = CostModel(situation.finished, situation.facts, situation.budget, cuda=situation.cuda)
    drawn = model.outcomes([*candidates, *situation.flying]).seconds
    seconds, flying = drawn[:, : len(candidates)], drawn[:, len(candidates) :]
    rival = flying.min(axis=1, initial=np.inf if best is None else best)[:, None]
    fitting, known = np.isfinite(seconds), np.isfinite(rival)
    speedup = np.where(known, rival, 1.0) / seconds  # without a rival any speed is a gain
    gains = np.where(known, np.maximum(speedup - 1.0, 0.0), speedup).mean(axis=0)
    wins = (fitting & (~known | (speedup > 1.0 + GAIN))).mean(axis=0)
    found = [
        Prospect(
            plan=plan,
            gain=float(gains[column]),
            chance=1.0 if best is None else float(wins[column]),
            fits=float(fitting[:, column].mean()),
        )
        for column, plan in enumerate(candidates)
    ]
    return sorted(found, key=lambda each: (each.gain, each.fits), reverse=True)


def choose(situation: Situation) -> Prospect | None:
    """Return the prospect to measure next; ``None`` when none is worthwhile.

    A launch that asks goes on with its own plans, unless one of another promises ``LEAVE`` times
    as much.
    """
    worthwhile = [each for each in prospects(situation) if each.worthwhile]
    fixed = situation.fixed
    if fixed is None or not worthwhile:
        return next(iter(worthwhile), None)
    here = next((each for each in worthwhile if each.plan.fixed == fixed), None)
    return here if here is not None and LEAVE * here.gain >= worthwhile[0].gain else None
