"""Which plan to measure next, and when to stop: what the cost model promises, weighed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autofit.analysis.cost_model import CostModel
from autofit.analysis.ranking import fits
from autofit.plan import Plan
from autofit.storage import TrialRecord
from autofit.strategies import Facts
from autofit.worker.records.trials import HORIZON

GAIN = 0.02
"""Expected gain in speed, as a share, below which a plan is not worth measuring."""
LEAVE = 2.5
"""A plan of another launch must promise this much more than one that can run in the present one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What measuring a plan promises."""

    plan: Plan
    gain: float
    """Expected gain in speed over the best, as a share, nothing where it is slower or does not fit.

    Before anything fits, its expected speed."""
    fits: float
    """Probability that it fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that a choice depends on."""

    candidates: tuple[Plan, ...]
    """Plans that may be measured now."""
    waiting: tuple[Plan, ...] = ()
    """Plans that may be measured once the same plan ``unsized`` was: they count for that one."""
    finished: tuple[TrialRecord, ...]
    running: tuple[Plan, ...] = ()
    """Plans that are being measured."""
    facts: Facts | None
    budget: int
    cuda: bool
    horizon: int = HORIZON
    """Optimizer steps over which the time to compile is charged."""
    fixed: Plan | None = None
    """What plans of the launch that asks must follow (``Plan.follows``); ``None``: a new one."""

    @property
    def best(self) -> float | None:
        """Seconds that the fastest plan that fits takes for the samples of a step of the script.

        Compiling charged; ``None`` before one fits.
        """
        fitting = [trial.measurement for trial in self.finished if fits(trial, self.budget)]
        whole = self.facts.effective_batch if self.facts else None
        speeds = [(whole or m.effective_batch, m.charged(self.horizon)) for m in fitting if m]
        return min((batch / speed for batch, speed in speeds), default=None)


def prospects(situation: Situation) -> list[Prospect]:
    """Return what each candidate promises, the most promising first.

    Before anything fits, every plan that may fit is a gain. A plan in launch counts with what it
    may come to, draw by draw.
    """
    candidates, best = situation.candidates, situation.best
    if not candidates:
        return []
    model = CostModel(
        situation.finished,
        situation.facts,
        situation.budget,
        cuda=situation.cuda,
        horizon=situation.horizon,
    )
    plans = [*candidates, *situation.running, *situation.waiting]
    drawn = model.outcomes(plans).seconds
    speed = (1.0 / drawn).mean(axis=0)
    opens = [[i for i, p in enumerate(plans) if plan in (p, p.unsized)] for plan in candidates]
    seconds = drawn[:, [max(columns, key=lambda i: float(speed[i])) for columns in opens]]
    running = drawn[:, len(candidates) : len(candidates) + len(situation.running)]
    rival = running.min(axis=1, initial=np.inf if best is None else best)[:, None]
    fitting, known = np.isfinite(seconds), np.isfinite(rival)
    speedup = np.where(known, rival, 1.0) / seconds  # without a rival any speed is a gain
    gains = np.where(known, np.maximum(speedup - 1.0, 0.0), speedup).mean(axis=0)
    found = [
        Prospect(
            plan=plan,
            gain=float(gains[column]),
            fits=float(fitting[:, column].mean()),
        )
        for column, plan in enumerate(candidates)
    ]
    return sorted(found, key=lambda each: (each.gain, each.fits), reverse=True)


def choose(situation: Situation) -> Prospect | None:
    """Return the prospect to measure next; ``None`` when none is worthwhile.

    A launch that asks goes on with its own plans, unless one of another promises ``LEAVE`` times
    as much, and first with those that fix no more than the plans before.
    """
    found = prospects(situation)
    worthwhile = [each for each in found if situation.best is None or each.gain >= GAIN]
    fixed = situation.fixed
    if fixed is None or not worthwhile:
        return next(iter(worthwhile), None)
    enough = worthwhile[0].gain / LEAVE
    stays = [each for each in worthwhile if each.gain >= enough and each.plan.follows(fixed)]
    alike = [each for each in stays if each.plan.fixed == fixed]  # so that neither shuts one out
    return next(iter(alike or stays), None)
