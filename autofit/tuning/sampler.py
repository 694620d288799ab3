"""Which plan is measured next: asks autofit's sampler, or one of Optuna.

autofit's sampler chooses the plan with the largest expected gain per second of its trial, from the
state of the search. Optuna's samplers see what an Optuna study can hold: parameters, values and
constraints of the trials so far.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from autofit.analysis.acquisition import Prospect, choose
from autofit.analysis.candidates import AskingLaunch, SearchSnapshot
from autofit.analysis.verdicts import fits
from autofit.exceptions import UsageError
from autofit.plan import Plan
from autofit.space.static_memory import least_bytes
from autofit.strategies import Facts
from autofit.tuning.optuna_study import MEMORY, choices_of, outcome, study_of

OURS = "autofit"
"""Name of the sampler of this module, for ``--sampler``."""
ALLOWED = "allowed"
"""Constraint: above zero for levels that cannot be combined, or that the script rules out."""
DEADLINE_STEP = 10.0
"""Seconds of ``--timeout`` after which a choice is made again."""
KNOWN = 20
"""Proposals in a row that need no trial, after which a sampler is taken to have no new plan."""
PATIENCE = 4
"""Trials in a row without a faster plan after which a search ends."""
OTHERS = 10
"""The same for a search by another sampler."""


class AutofitSampler:
    """Suggests the plan of the largest expected gain per second that its trial costs."""

    def __init__(
        self, *, expectations: Mapping[tuple[str, str], tuple[float, float]] | None = None
    ) -> None:
        """Create a sampler; ``expectations``: other priors, as in ``CostModel``."""
        self._expectations = expectations
        self._chosen: tuple[object, Prospect | None] = (None, None)
        """The last choice, and what it was made from."""

    def choice(self, state: SearchSnapshot, launch: AskingLaunch | None = None) -> Prospect | None:
        """Return the prospect to measure next in ``launch``, or in a new one.

        ``None`` if no plan is worth a trial there.
        """
        left = state.seconds_left
        steps = None if left is None else round(left / DEADLINE_STEP)
        made_from = replace(state, seconds_left=steps), launch
        if self._chosen[0] != made_from:
            self._chosen = made_from, self.choose(state, launch)
        return self._chosen[1]

    def choose(self, state: SearchSnapshot, launch: AskingLaunch | None) -> Prospect | None:
        """Return the choice, made anew."""
        if state.level_sets is not None and not state.fits:
            return None  # the fixed starts look for a level set that fits
        return choose(replace(state.situation(launch), expectations=self._expectations))


class Suggestions:
    """The plans that a sampler suggests for a search."""

    def __init__(self, sampler: str = OURS) -> None:
        """``sampler``: as for ``sampler_of``."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._sampler = sampler_of(sampler)
        self._held: Plan | None = None
        """A plan that was suggested, and that needs a new launch."""
        self._exhausted = False
        """Whether the sampler proposed only known plans."""

    def next(self, state: SearchSnapshot, launch: AskingLaunch | None = None) -> Plan | None:
        """Return the plan to measure next in ``launch``, or in a new one; ``None`` without one."""
        if self.has_plan(state, launch) and self._held is None:
            self._held = self._ask(state, launch)
        plan = self._held
        if plan is None or (launch is not None and not launch.can_measure(plan)):
            return None
        self._held = None
        return plan

    def has_plan(self, state: SearchSnapshot, launch: AskingLaunch | None = None) -> bool:
        """Return whether a plan is worth a trial in ``launch``, or in a new one.

        autofit's own sampler says which gain it expects. With it a search ends when it expects
        none, or after ``PATIENCE`` trials in a row without a faster plan. With another sampler it
        ends after ``OTHERS`` such trials, or after ``KNOWN`` proposals of known plans.
        """
        if self._held is not None:
            return True
        fitting = (each for each in state.finished if fits(each, state.budget))
        speeds = [t.measurement.charged(state.horizon) for t in fitting if t.measurement]
        later = speeds[speeds.index(max(speeds)) + 1 :] if speeds else speeds
        if isinstance(self._sampler, AutofitSampler):
            return len(later) < PATIENCE and self._sampler.choice(state, launch) is not None
        return len(later) < OTHERS and not self._exhausted

    def worth_running(self, state: SearchSnapshot) -> bool:
        """Return whether a plan would be started now, one of those that run included."""
        if not isinstance(self._sampler, AutofitSampler):
            return True
        return self._sampler.choose(replace(state, running=frozenset()), None) is not None

    def _ask(self, state: SearchSnapshot, launch: AskingLaunch | None) -> Plan | None:
        """Ask the sampler; one of Optuna until its plan is not known, at most ``KNOWN`` times."""
        if isinstance(self._sampler, AutofitSampler):
            chosen = self._sampler.choice(state, launch)
            return None if chosen is None or _known(chosen.plan, state) else chosen.plan
        study = study_of(state, self._sampler)
        choices: dict[str, BaseDistribution] = {**choices_of(state)}
        for _ in range(KNOWN):
            trial = study.ask(choices)
            plan = Plan.of(trial.params)
            if (known := _known(plan, state)) is None:
                return plan
            for name, excess in known.pop("constraints", {}).items():
                trial.set_constraint(name, excess)
            study.tell(trial, known.get("value"), known["state"])
        self._exhausted = True
        return None


def _known(plan: Plan, state: SearchSnapshot) -> dict[str, Any] | None:
    """Return what is known of a plan without a trial, as ``outcome`` does; ``None`` if nothing."""
    if state.why_not(plan) is not None:
        return {"state": TrialState.PRUNED, "constraints": {ALLOWED: 1.0}}
    if (finished := next((t for t in state.finished if t.plan.searched == plan), None)) is not None:
        return outcome(finished, state.budget, state.horizon)
    if plan in state.running:
        return {"state": TrialState.FAIL}
    least = least_bytes(plan, state.facts or Facts(), cuda=state.cuda)
    if least > state.budget:
        return {"state": TrialState.PRUNED, "constraints": {MEMORY: least / state.budget - 1.0}}
    return None


def sampler_of(name: str) -> AutofitSampler | BaseSampler:
    """Return the sampler for ``--sampler``: ``autofit``, ``tpe``, ``gp``, ``random``, or a class.

    A class is given as ``module:Class``, and is created without arguments. Raises ``UsageError``.
    """
    if name == OURS:
        return AutofitSampler()
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=0, constant_liar=True)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=0)
    if name == "gp":
        if importlib.util.find_spec("scipy") is None:
            raise UsageError("--sampler gp needs SciPy: pip install 'autofit-torch[gp]'")
        return optuna.samplers.GPSampler(seed=0)
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise UsageError(
            f"--sampler {name}: give autofit, tpe, gp, random, or module:Class of an Optuna sampler"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise UsageError(f"--sampler {name}: {error}") from error
    if not isinstance(found, BaseSampler):
        raise UsageError(f"--sampler {name}: it is not a subclass of optuna.samplers.BaseSampler")
    return found
