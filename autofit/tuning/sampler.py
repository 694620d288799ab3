"""The Optuna sampler that chooses the plan with the largest expected gain per second.

It holds no state of the search. What it knows stands in the Optuna study and in its trials, running
ones included: in parameters, constraints and the attributes of ``autofit/tuning/attributes.py``.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autofit.analysis.acquisition import Prospect, choose
from autofit.analysis.candidates import Launch, SearchState
from autofit.analysis.verdicts import corrected
from autofit.exceptions import UsageError
from autofit.facts import Bandwidth
from autofit.plan import Plan
from autofit.space.catalogue import Space
from autofit.storage import Owner, Purpose, State, TrialRecord
from autofit.storage.convert import from_json
from autofit.strategies import Facts
from autofit.tuning.attributes import Attribute, parameters, strategy_of
from autofit.worker.records.trials import HORIZON, TrialReport, Verdict

OURS = "autofit"
"""Name of the sampler of this module, for ``--sampler``."""
DEADLINE_STEP = 10.0
"""Seconds of ``--timeout`` after which a choice is made again."""
NOBODY = Owner(host="", pid=0, started=0.0)
"""The owner of a trial that was read from an Optuna study, which stores none."""


class AutofitSampler(BaseSampler):
    """Suggests the plan of the largest expected gain per second that its trial costs."""

    def __init__(
        self, *, expectations: Mapping[tuple[str, str], tuple[float, float]] | None = None
    ) -> None:
        """Create a sampler; ``expectations``: other priors, as in ``CostModel``."""
        self._expectations = expectations
        self._read: dict[int, TrialRecord] = {}
        """The finished trials of the study, by number."""
        self._chosen: tuple[object, Prospect | None] = (None, None)
        """The last choice, and what it was made from."""

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the parameters of the strategies that have a choice now."""
        known = study.user_attrs.get(Attribute.PARAMETERS, {})
        now = parameters(space_of(study).levels, known)
        return {name: CategoricalDistribution(choices) for name, choices in now.items()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the levels of the chosen plan for the launch that asked for ``trial``."""
        chosen = self.choice(study, launch_of(trial))
        plan = chosen.plan if chosen is not None else Plan()
        return {name: plan[strategy_of(name)] for name in search_space}

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return the first choice: ``as_is``, for a parameter that is not of the search."""
        assert isinstance(param_distribution, CategoricalDistribution), "levels are categories"
        return param_distribution.choices[0]

    def choice(self, study: Study, launch: Launch | None = None) -> Prospect | None:
        """Return the prospect to measure next in ``launch``, or in a new one.

        ``None`` if no plan is worth a trial there.
        """
        state = self._state(study)
        left = state.seconds_left
        made_from = (
            len(state.finished),
            study.user_attrs.get(Attribute.CONFIRMATIONS),
            study.user_attrs.get(Attribute.AMENDED),
            state.running,
            state.facts,
            state.space,
            state.spreads_later,
            state.bandwidth,
            None if left is None else round(left / DEADLINE_STEP),
            launch,
        )
        if self._chosen[0] != made_from:
            self._chosen = made_from, self._choose(state, launch)
        return self._chosen[1]

    def expected_gain(self, study: Study, launch: Launch | None = None) -> float | None:
        """Return the expected gain of the plan to measure next in ``launch``, or in a new one.

        ``None`` if no plan pays for its trial there.
        """
        chosen = self.choice(study, launch)
        return chosen.gain if chosen is not None else None

    def worth_running(self, study: Study) -> bool:
        """Return whether a plan would be started now, one of those that run included."""
        state = replace(self._state(study), running=frozenset())
        return self._choose(state, None) is not None

    def _choose(self, state: SearchState, launch: Launch | None) -> Prospect | None:
        if state.level_sets is not None and not state.fits:
            return None  # the fixed starts look for a level set that fits
        return choose(replace(state.situation(launch), expectations=self._expectations))

    def _state(self, study: Study) -> SearchState:
        return state_of(study, self._read)


def state_of(study: Study, read: dict[int, TrialRecord] | None = None) -> SearchState:
    """Return what a study knows of its search.

    ``read``: finished trials that were read before, by number; new ones are added.
    """
    read = {} if read is None else read
    attributes = study.user_attrs
    budget = int(attributes[Attribute.BUDGET])
    trials = study.get_trials(deepcopy=False)
    for trial in trials:
        new = trial.number not in read and Attribute.RECORD in trial.user_attrs
        if new and trial.state.is_finished() and Attribute.REPORT in trial.user_attrs:
            read[trial.number] = _record(trial, study, budget)
    amended = attributes.get(Attribute.AMENDED, {})
    reports = {
        number: amended.get(str(trials[number].user_attrs[Attribute.RECORD])) for number in read
    }
    found = [
        record if report is None else replace(record, report=from_json(report, TrialReport))
        for number, record in read.items()
        for report in (reports[number],)
    ]
    again = attributes.get(Attribute.CONFIRMATIONS, ())
    confirmations = tuple(
        _confirmation(number, report, study, budget) for number, report in enumerate(again)
    )
    drifted = (t.report for t in confirmations if t.verdict is Verdict.DRIFTED)
    facts, deadline = attributes.get(Attribute.FACTS), attributes.get(Attribute.DEADLINE)
    bandwidth = attributes.get(Attribute.BANDWIDTH)
    return SearchState(
        space=space_of(study),
        finished=tuple(corrected(trial, confirmations, budget) for trial in found),
        running=frozenset(plan_of(t) for t in trials if t.state is TrialState.RUNNING and _has(t)),
        drifted=tuple(report for report in drifted if report is not None),
        facts=from_json(facts, Facts) if facts else None,
        budget=budget,
        cuda=attributes.get(Attribute.DEVICE) == "cuda",
        horizon=int(attributes.get(Attribute.HORIZON, HORIZON)),
        seconds_left=None if deadline is None else deadline - time.time(),
        link=attributes.get(Attribute.LINK, ""),
        bandwidth=from_json(bandwidth, Bandwidth) if bandwidth else None,
        spreads_later=bool(attributes.get(Attribute.SPREADS_LATER)),
    )


def space_of(study: Study) -> Space:
    """Return the levels that may be tried now."""
    levels = study.user_attrs.get(Attribute.SPACE, {})
    return Space(levels=tuple((name, tuple(each)) for name, each in levels.items()))


def plan_of(trial: FrozenTrial) -> Plan:
    """Return the plan of a trial. Raises ``UsageError`` for a level that this version lacks."""
    if (levels := trial.user_attrs.get(Attribute.PLAN)) is not None:
        return Plan.of(levels)
    return Plan.of({strategy_of(name): level for name, level in trial.params.items()})


def launch_of(trial: FrozenTrial) -> Launch | None:
    """Return the launch that asked for a trial; ``None`` for a new one."""
    asked = trial.user_attrs.get(Attribute.LAUNCH)
    return Launch(Plan.of(asked["fixed"]), asked["fresh"]) if asked else None


def sampler_of(name: str) -> BaseSampler:
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
        _require("scipy", "--sampler gp needs SciPy: pip install 'autofit-torch[gp]'")
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
        raise UsageError(f"--sampler {name}: it is no optuna.samplers.BaseSampler")
    return found


def _require(module: str, message: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UsageError(message) from error


def _has(trial: FrozenTrial) -> bool:
    """Return whether a running trial has its plan already."""
    return Attribute.PLAN in trial.user_attrs


def _record(trial: FrozenTrial, study: Study, budget: int) -> TrialRecord:
    report = from_json(trial.user_attrs[Attribute.REPORT], TrialReport)
    return _trial(trial.number, report, Purpose.SEARCH, study, budget)


def _confirmation(number: int, report: Any, study: Study, budget: int) -> TrialRecord:
    return _trial(number, from_json(report, TrialReport), Purpose.CONFIRM, study, budget)


def _trial(
    number: int, report: TrialReport, purpose: Purpose, study: Study, budget: int
) -> TrialRecord:
    return TrialRecord(
        id=number,
        study=study.study_name,
        number=number,
        purpose=purpose,
        state=State.FINISHED,
        plan=report.plan,
        launch=0,
        owner=NOBODY,
        budget=budget,
        versions={},
        created=datetime.fromtimestamp(0, UTC),
        report=report,
    )
