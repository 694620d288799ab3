"""Acquisition: which plan to measure next, and when to stop, given the cost model.

A trial costs seconds of a device, and pays if its plan is faster. The plan with the largest
expected gain per second comes first, as in cost-aware Bayesian optimization (Snoek et al., 2012,
section 3.2: https://arxiv.org/abs/1206.2944).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from autofit.analysis.candidates import Situation
from autofit.analysis.cost_model import CostModel
from autofit.analysis.verdicts import fits
from autofit.plan import Plan

GAIN = 0.02
"""Minimum expected gain in speed, as a share, for which a plan is measured."""
GAIN_BEFORE_SPREAD = 0.25
"""The same while plans run on one device each and will be spread over several.

A spread training is far faster, and a launch of it can still measure what was left out.
"""
GAIN_SPREAD = 0.1
"""The same once plans run on all devices, so that every trial holds all of them."""
START_SECONDS = 20.0
"""Seconds until a new launch calls the model, until a launch was timed."""
PAYBACK = 1.5
"""A plan is measured if it is expected to save so many times the seconds of its trial."""
SWITCH_SECONDS = 1.0
"""Seconds to put a plan on a model and to take it back, beside its chunks."""
CLOSING = 2.0
"""A plan that adds a fixed level comes first if it gains this many times as much per second."""
PROBED_STEPS = 4
"""Optimizer steps that take as long as the chunks of a trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """The expected gain from measuring a plan, and what the trial costs."""

    plan: Plan
    gain: float
    """Expected improvement in speed over the incumbent, as a share.

    A draw in which the plan is slower or does not fit counts as zero. Before any plan fits, the
    expected speed in steps per second."""
    fits: float
    """Probability that the plan fits the budget."""
    seconds: float
    """Expected seconds of the trial: start of a launch, compilation and chunks."""

    @property
    def rate(self) -> float:
        """Expected gain per second of the trial."""
        return self.gain / self.seconds


def prospects(situation: Situation) -> list[Prospect]:
    """Return the prospect of each candidate, the largest gain per second first.

    A candidate is compared with the incumbent and with the plans that are running. In each draw of
    the posterior, the fastest of these sets the time to beat.
    """
    state, candidates, best = situation.state, situation.candidates, _best(situation)
    if not candidates:
        return []
    model = CostModel(
        situation.finished,
        state.facts,
        state.budget,
        cuda=state.cuda,
        link=state.link,
        bandwidth=state.bandwidth,
        horizon=state.horizon,
        expectations=situation.expectations,
    )
    plans = [*candidates, *state.running, *situation.waiting]
    drawn = model.outcomes(plans).seconds
    speed = (1.0 / drawn).mean(axis=0)
    enabled = [[i for i, p in enumerate(plans) if plan in (p, p.unsized)] for plan in candidates]
    seconds = drawn[:, [max(columns, key=lambda i: float(speed[i])) for columns in enabled]]
    running = drawn[:, len(candidates) : len(candidates) + len(state.running)]
    rival = running.min(axis=1, initial=np.inf if best is None else best)[:, None]
    fitting, known = np.isfinite(seconds), np.isfinite(rival)
    speedup = np.where(known, rival, 1.0) / seconds  # without a rival, the speed itself
    gains = np.where(known, np.maximum(speedup - 1.0, 0.0), speedup).mean(axis=0)
    found = []
    for column, plan in enumerate(candidates):
        own = drawn[:, column]
        step = float(np.median(own[np.isfinite(own)])) if np.isfinite(own).any() else 0.0
        likely = float(fitting[:, column].mean())
        cost = _seconds(plan, step, likely, situation, model)
        found.append(Prospect(plan=plan, gain=float(gains[column]), fits=likely, seconds=cost))
    return sorted(found, key=lambda each: (each.rate, each.fits), reverse=True)


def _best(situation: Situation) -> float | None:
    """Return the step seconds of the incumbent, for the samples in one step of the script.

    They include its share of the time to compile. ``None`` before any plan fits.
    """
    state = situation.state
    fitting = [trial.measurement for trial in situation.finished if fits(trial, state.budget)]
    whole = state.facts.effective_batch if state.facts else None
    speeds = [(whole or m.effective_batch, m.charged(state.horizon)) for m in fitting if m]
    return min((batch / speed for batch, speed in speeds), default=None)


def _start(situation: Situation) -> float:
    """Return the seconds until a new launch calls the model: the median of those timed."""
    reports = (trial.report for trial in situation.finished)
    timed = [r.startup_seconds for r in reports if r is not None and r.startup_seconds]
    return statistics.median(timed) if timed else START_SECONDS


def _seconds(
    plan: Plan, step: float, likely: float, situation: Situation, model: CostModel
) -> float:
    """Return the expected seconds of a trial whose steps take ``step`` seconds.

    ``likely``: the probability that the plan fits. A trial of several ranks that runs out of memory
    costs the start of another launch.
    """
    fixed = situation.fixed
    here = fixed is not None and plan.follows(fixed)
    starts = (0.0 if here else 1.0) + (1.0 - likely) * (plan.ranks > 1)
    return (
        starts * _start(situation)
        + SWITCH_SECONDS
        + model.compile_seconds(plan)
        + PROBED_STEPS * step
    )


def worthwhile(situation: Situation) -> list[Prospect]:
    """Return the prospects that pay for their trial, the largest gain per second first.

    Before any plan fits, all do. Then the expected gain must be at least ``GAIN``, or what stands
    in its place. Over ``horizon`` steps it must save ``PAYBACK`` times the seconds of the trial.
    The trial must end before ``--timeout``.
    """
    state, best = situation.state, _best(situation)
    left = state.seconds_left
    found = [p for p in prospects(situation) if left is None or p.seconds <= left]
    if best is None:
        return found
    whole = best * state.horizon
    least = GAIN if state.space.ranks == 1 else GAIN_SPREAD
    least = GAIN_BEFORE_SPREAD if state.spreads_later else least
    found = [each for each in found if each.gain >= least]
    return [
        each for each in found if each.gain / (1.0 + each.gain) * whole >= PAYBACK * each.seconds
    ]


def choose(situation: Situation) -> Prospect | None:
    """Return the prospect to measure next; ``None`` if none is worth a trial.

    ``None`` ends a running launch, if a plan that needs a new launch gains more per second than
    each plan that the running one can measure. A plan that adds no fixed level leaves the launch
    open for more plans. It comes first, unless another gains ``CLOSING`` times as much per second.
    """
    found, fixed = worthwhile(situation), situation.fixed
    if fixed is None or not found:
        return next(iter(found), None)
    possible = [p for p in found if p.rate >= found[0].rate and p.plan.follows(fixed)]
    enough = found[0].rate / CLOSING
    same_fixed = [p for p in found if p.rate >= enough and p.plan.fixed == fixed]
    return next(iter(same_fixed or possible), None)
