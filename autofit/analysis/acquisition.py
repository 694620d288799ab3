"""Acquisition: which plan to measure next, and when to stop, given the cost model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autofit.analysis.cost_model import CostModel
from autofit.analysis.verdicts import fits
from autofit.plan import Plan
from autofit.storage import TrialRecord
from autofit.strategies import Facts
from autofit.worker.records.trials import HORIZON

GAIN = 0.02
"""Minimum expected gain in speed, as a share, for which a plan is measured."""
NEW_LAUNCH_FACTOR = 2.5
"""A running launch ends if a plan that needs a new launch has this many times its expected gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """The expected gain from measuring a plan."""

    plan: Plan
    gain: float
    """Expected improvement in speed over the incumbent, as a share.

    A draw in which the plan is slower or does not fit counts as zero. Before any plan fits, the
    expected speed in steps per second."""
    fits: float
    """Probability that the plan fits the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The state of a search, as far as the next choice depends on it."""

    candidates: tuple[Plan, ...]
    """Plans that may be measured now."""
    waiting: tuple[Plan, ...] = ()
    """Plans that may be measured only after their ``unsized`` plan.

    Their expected speed counts for the ``unsized`` plan."""
    finished: tuple[TrialRecord, ...]
    running: tuple[Plan, ...] = ()
    """Plans that are being measured."""
    facts: Facts | None
    budget: int
    cuda: bool
    horizon: int = HORIZON
    """Optimizer steps over which the time to compile is charged."""
    fixed: Plan | None = None
    """Fixed levels of the launch that asks for a plan (``Plan.follows``).

    ``None`` for a new launch."""

    @property
    def best(self) -> float | None:
        """Step seconds of the incumbent, for the samples in one step of the script.

        Includes its share of the time to compile. ``None`` before any plan fits.
        """
        fitting = [trial.measurement for trial in self.finished if fits(trial, self.budget)]
        whole = self.facts.effective_batch if self.facts else None
        speeds = [(whole or m.effective_batch, m.charged(self.horizon)) for m in fitting if m]
        return min((batch / speed for batch, speed in speeds), default=None)


def prospects(situation: Situation) -> list[Prospect]:
    """Return the prospect of each candidate, the largest expected gain first.

    A candidate is compared with the incumbent and with the plans that are running. In each draw of
    the posterior, the fastest of these sets the time to beat.
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
    enabled = [[i for i, p in enumerate(plans) if plan in (p, p.unsized)] for plan in candidates]
    seconds = drawn[:, [max(columns, key=lambda i: float(speed[i])) for columns in enabled]]
    running = drawn[:, len(candidates) : len(candidates) + len(situation.running)]
    rival = running.min(axis=1, initial=np.inf if best is None else best)[:, None]
    fitting, known = np.isfinite(seconds), np.isfinite(rival)
    speedup = np.where(known, rival, 1.0) / seconds  # without a rival, the speed itself
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
    """Return the prospect to measure next; ``None`` if none is worth a trial.

    A running launch continues with a plan that it can measure, because a new launch costs a start.
    It ends if another plan has ``NEW_LAUNCH_FACTOR`` times the expected gain. Plans that add no
    fixed level come first, because they leave the launch open for more plans.
    """
    found = prospects(situation)
    worthwhile = [each for each in found if situation.best is None or each.gain >= GAIN]
    fixed = situation.fixed
    if fixed is None or not worthwhile:
        return next(iter(worthwhile), None)
    enough = worthwhile[0].gain / NEW_LAUNCH_FACTOR
    possible = [each for each in worthwhile if each.gain >= enough and each.plan.follows(fixed)]
    same_fixed = [each for each in possible if each.plan.fixed == fixed]
    return next(iter(same_fixed or possible), None)
