"""The Optuna study of a search: every plan that a search measures comes out of ``Study.ask``.

The tables of autofit are authoritative. Optuna's tables are written after them and can be rebuilt
from them. If the process is killed between the two writes, ``OptunaStudy.catch_up`` tells Optuna
the missing trials. ``optuna-dashboard`` shows the same file.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from autofit.analysis.candidates import Launch, SearchState
from autofit.exceptions import UsageError
from autofit.plan import Plan
from autofit.space.static_memory import least_bytes
from autofit.storage import Purpose, Store, StudyRecord, TrialRecord
from autofit.storage.convert import plan_to_json, to_json
from autofit.strategies import NAMES, Facts
from autofit.tuning.attributes import ALLOWED, MEMORY, Attribute, parameters, strategy_of
from autofit.units import format_size
from autofit.worker.records.trials import HORIZON, TrialReport, Verdict

if TYPE_CHECKING:
    import optuna

    from autofit.tuning.sampler import AutofitSampler

KNOWN = 20
"""Proposals in a row that need no trial, after which a sampler is taken to have no new plan."""
DEADLINE_TOLERANCE = 1.0
"""Seconds by which the deadline may move before it is set again."""
PATIENCE = 4
"""Trials in a row without a faster plan after which a search ends."""
OTHERS = 10
"""The same for a search by another sampler."""

P = ParamSpec("P")
T = TypeVar("T")


def _explained(
    method: Callable[Concatenate[OptunaStudy, P], T],
) -> Callable[Concatenate[OptunaStudy, P], T]:
    """Make a method raise ``StorageError`` in place of Optuna's database errors."""

    @functools.wraps(method)
    def explained(self: OptunaStudy, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._store.explained():
            return method(self, *args, **kwargs)

    return explained


class OptunaStudy:
    """The Optuna study of a study. Its methods raise ``StorageError``."""

    def __init__(
        self, store: Store, study: StudyRecord, *, horizon: int = HORIZON, sampler: str = "autofit"
    ) -> None:
        """Open or create it; ``sampler``: as for ``sampler.sampler_of``."""
        import optuna

        from autofit.tuning.sampler import AutofitSampler, sampler_of

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._store = store
        self._budget = study.budget
        self._horizon = horizon
        self._open_trials: dict[Plan, optuna.Trial] = {}
        self._parameters: dict[str, list[str]] = {}
        """The present parameters and their choices."""
        self._held: Plan | None = None
        """A plan that was asked for, and that needs a new launch."""
        self._exhausted = False
        """Whether the sampler proposed only known plans."""
        with warnings.catch_warnings(), store.explained():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._sampler = sampler_of(sampler)
            own = self._sampler if isinstance(self._sampler, AutofitSampler) else None
            self._own: AutofitSampler | None = own
            with store.alone():
                storage = optuna.storages.RDBStorage(store.url)
            self._study = optuna.create_study(
                storage=storage,
                study_name=name_of(study),
                sampler=self._sampler,
                pruner=optuna.pruners.NopPruner(),
                direction="minimize",
                load_if_exists=True,
            )
            self._attributes = self._study.user_attrs
            self._set(Attribute.BUDGET, study.budget)
            self._set(Attribute.DEVICE, study.hardware.device)
            self._set(Attribute.LINK, study.hardware.link)
            self._set(Attribute.HORIZON, horizon)
            self._set("script", str(study.script))
            self._set("hardware", study.hardware.name)
            self._study.set_metric_names(["seconds a sample"])

    # --- asking ----------------------------------------------------------------------------

    @_explained
    def ask(
        self, state: SearchState, launch: Launch | None = None, *, start: Plan | None = None
    ) -> Plan | None:
        """Return the plan to measure next in ``launch``, or in a new one; ``None`` without one.

        ``start``: a fixed start, which is enqueued and therefore asked for next.
        """
        self._describe(state)
        if start is not None:
            return self._ask_start(start)
        if self._held is not None:
            return self._release(launch, state)
        for _ in range(KNOWN):
            if self.should_stop(launch):
                return None
            trial = self._ask_for(launch)
            plan = self._suggested(trial)
            if not self._settled(trial, plan, state):
                assert plan is not None, "a plan that can be measured"
                self._begin(plan, trial)
                self._held = plan
                return self._release(launch, state)
        self._exhausted = True
        return None

    @_explained
    def has_plan(self, state: SearchState) -> bool:
        """Return whether a plan is worth a trial in a new launch."""
        self._describe(state)
        return not self.should_stop()

    @_explained
    def worth_running(self, state: SearchState) -> bool:
        """Return whether a plan would be started now, one of those that run included."""
        self._describe(state)
        return self._own is None or self._own.worth_running(self._study)

    def should_stop(self, launch: Launch | None = None) -> bool:
        """Return whether no plan is worth a trial in ``launch``, or in a new one.

        autofit's own sampler says which gain it expects. With it a search ends when it expects
        none, or after ``PATIENCE`` trials in a row without a faster plan. With another sampler it
        ends after ``OTHERS`` such trials, or after ``KNOWN`` proposals of known plans.
        """
        if self._held is not None:
            return False
        values = [t.value for t in self._measured() if self._holds(t) and t.value is not None]
        later = values[values.index(min(values)) + 1 :] if values else values
        if self._own is not None:
            return len(later) >= PATIENCE or (self._own.expected_gain(self._study, launch) is None)
        return self._exhausted or len(later) >= OTHERS

    def _ask_for(self, launch: Launch | None) -> optuna.Trial:
        """Ask for a trial; the sampler finds the launch in its attributes."""
        asked = {"fixed": plan_to_json(launch.fixed), "fresh": launch.fresh} if launch else None
        self._study.enqueue_trial({}, user_attrs={str(Attribute.LAUNCH): asked})
        return self._study.ask()

    def _ask_start(self, plan: Plan) -> Plan:
        fixed = {name: plan.searched[name] for name in NAMES}
        attributes = {str(Attribute.PLAN): plan_to_json(plan)}
        self._study.enqueue_trial(fixed, user_attrs=attributes)
        self._begin(plan, self._study.ask())
        return plan

    def _begin(self, plan: Plan, trial: optuna.Trial) -> None:
        trial.set_user_attr(Attribute.PLAN, plan_to_json(plan))
        self._open_trials[plan] = trial

    def _release(self, launch: Launch | None, state: SearchState) -> Plan | None:
        """Return the plan that waits for a launch, if ``launch`` can measure it."""
        plan = self._held
        if plan is not None and (launch is None or launch.can_measure(plan)):
            self._held = None
            return plan
        return None

    def _suggested(self, trial: optuna.Trial) -> Plan | None:
        """Return the plan that a trial suggests; ``None`` for a level that is gone."""
        levels = {
            strategy_of(name): trial.suggest_categorical(name, choices)
            for name, choices in self._parameters.items()
        }
        try:
            return Plan.of(levels)
        except UsageError:
            return None

    def _settled(self, trial: optuna.Trial, plan: Plan | None, state: SearchState) -> bool:
        """Tell Optuna what is known of a proposal without a trial; return whether it is."""
        states, refusal = self._optuna.trial.TrialState, ""
        if plan is None:
            refusal = "a level that this version does not have"
        else:
            refusal = state.why_not(plan) or ""
        if plan is None or refusal:
            trial.set_user_attr("reason", refusal)
            trial.set_constraint(ALLOWED, 1.0)
            self._study.tell(trial, state=states.PRUNED)
            return True
        least = least_bytes(plan, state.facts or Facts(), cuda=state.cuda)
        finished = next((t for t in state.finished if t.plan.searched == plan), None)
        if finished is not None:
            trial.set_user_attr("reason", "measured before")
            self._tell(trial, finished)
        elif plan in state.running:
            self._study.tell(trial, state=states.FAIL)
        elif least > self._budget:
            trial.set_user_attr("reason", f"needs {format_size(least)} at least")
            trial.set_constraint(MEMORY, least / self._budget - 1.0)
            self._study.tell(trial, state=states.PRUNED)
        else:
            return False
        return True

    def _describe(self, state: SearchState) -> None:
        """Set the study's attributes to the state of the search."""
        self._set(Attribute.FACTS, to_json(state.facts) if state.facts is not None else None)
        known = self._attributes.get(Attribute.PARAMETERS, {})
        self._parameters = parameters(state.space.levels, known)
        self._set(Attribute.PARAMETERS, {**known, **self._parameters})
        self._set(Attribute.SPACE, {name: list(levels) for name, levels in state.space.levels})
        self._set(Attribute.SPREADS_LATER, state.spreads_later)
        bandwidth = state.bandwidth
        self._set(Attribute.BANDWIDTH, None if bandwidth is None else to_json(bandwidth))
        deadline = None if state.seconds_left is None else time.time() + state.seconds_left
        before = self._attributes.get(Attribute.DEADLINE)
        if deadline is None or before is None or abs(deadline - before) > DEADLINE_TOLERANCE:
            self._set(Attribute.DEADLINE, deadline)

    # --- telling ---------------------------------------------------------------------------

    @_explained
    def catch_up(self, trials: Iterable[TrialRecord]) -> None:
        """Tell Optuna what a killed search did not tell, and end the trials that it left open.

        ``trials``: all trials of the study, confirmation runs included.
        """
        trials = tuple(trials)
        states = self._optuna.trial.TrialState
        told: dict[int, tuple[int, optuna.trial.TrialState]] = {}
        for mirrored in self._study.get_trials(deepcopy=False):
            if mirrored.state in (states.RUNNING, states.WAITING):
                self._fail(mirrored)
            elif Attribute.RECORD in mirrored.user_attrs:
                told[mirrored.user_attrs[Attribute.RECORD]] = mirrored.number, mirrored.state
        for trial in trials:
            if trial.report is None or trial.purpose is not Purpose.SEARCH:
                continue
            number, state = told.get(trial.id, (-1, None))
            if state is not self._outcome(trial)[0]:  # not told, or given up after an earlier kill
                self.tell(trial)
            elif trial.optuna_number != number:
                self._store.set_optuna_number(trial, number)
        self.confirmed(t for t in trials if t.purpose is Purpose.CONFIRM)
        self.amended(trials)

    def _fail(self, trial: optuna.trial.FrozenTrial) -> None:
        states = self._optuna.trial.TrialState
        if trial.state is states.WAITING:
            self._study._storage.set_trial_state_values(trial._trial_id, states.RUNNING)
        self._study.tell(trial.number, state=states.FAIL)

    @_explained
    def confirmed(self, trials: Iterable[TrialRecord]) -> None:
        """Set the confirmation runs, which correct the trials of their plans."""
        reports = [to_json(trial.report) for trial in trials if trial.report is not None]
        self._set(Attribute.CONFIRMATIONS, reports)

    @_explained
    def amended(self, trials: Iterable[TrialRecord]) -> None:
        """Set the reports that have changed since Optuna was told: it keeps ended trials."""
        kept = {
            t.user_attrs[Attribute.RECORD]: t.user_attrs.get(Attribute.REPORT)
            for t in self._study.get_trials(deepcopy=False)
            if Attribute.RECORD in t.user_attrs
        }
        reports = {t.id: to_json(t.report) for t in trials if t.report is not None and t.id in kept}
        changed = {str(key): each for key, each in reports.items() if each != kept[key]}
        self._set(Attribute.AMENDED, changed)

    @_explained
    def drop(self, plan: Plan) -> None:
        """End the Optuna trial of a plan whose trial ended without a verdict."""
        if (open_trial := self._open_trials.pop(plan, None)) is not None:
            self._study.tell(open_trial, state=self._optuna.trial.TrialState.FAIL)

    @_explained
    def tell(self, trial: TrialRecord, seconds: Mapping[str, float] | None = None) -> None:
        """Tell Optuna a finished trial, and store the number of the Optuna trial.

        ``seconds``: what the trial cost, by phase.
        """
        open_trial = self._open_trials.pop(trial.plan, None)
        if open_trial is None:  # asked for by a search that was killed
            open_trial = self._given_again(trial)
        open_trial.set_user_attr(Attribute.RECORD, trial.id)
        for name, attribute in _attributes(trial).items():
            open_trial.set_user_attr(name, attribute)
        if seconds:
            open_trial.set_user_attr("seconds", dict(seconds))
        number = self._tell(open_trial, trial)
        self._store.set_optuna_number(trial, number)

    def _given_again(self, trial: TrialRecord) -> optuna.Trial:
        self._ask_start(trial.plan)
        return self._open_trials.pop(trial.plan)

    def _tell(self, open_trial: optuna.Trial, trial: TrialRecord) -> int:
        state, value, constraints = self._outcome(trial)
        for name, choices in self._parameters.items():
            if name not in open_trial.params:
                open_trial.suggest_categorical(name, choices)
        for name, excess in constraints.items():
            open_trial.set_constraint(name, excess)
        return self._study.tell(open_trial, value, state).number

    def _outcome(
        self, trial: TrialRecord
    ) -> tuple[optuna.trial.TrialState, float | None, dict[str, float]]:
        """Return the Optuna state, the seconds a sample and the constraints of a finished trial.

        A trial that ran out of memory is ``PRUNED``: its constraint stays known to Optuna.
        """
        states = self._optuna.trial.TrialState
        measurement = trial.measurement
        if trial.verdict is Verdict.MEASURED and measurement is not None:
            excess = measurement.peak_device / self._budget - 1.0
            return states.COMPLETE, 1.0 / measurement.charged(self._horizon), {MEMORY: excess}
        if trial.verdict is Verdict.OUT_OF_MEMORY:
            shortage = trial.report.out_of_memory if trial.report else None
            requested = (shortage.requested if shortage else None) or self._budget
            return states.PRUNED, None, {MEMORY: max(requested / self._budget, 1e-3)}
        return states.FAIL, None, {}

    # --- reading ---------------------------------------------------------------------------

    def _measured(self) -> list[optuna.trial.FrozenTrial]:
        """Return the trials of plans that were measured, without repeated proposals."""
        complete = (self._optuna.trial.TrialState.COMPLETE,)
        found = self._study.get_trials(deepcopy=False, states=complete)
        return [trial for trial in found if Attribute.RECORD in trial.user_attrs]

    def _holds(self, trial: optuna.trial.FrozenTrial) -> bool:
        return all(excess <= 0 for excess in trial.constraints.values())

    def _set(self, name: str, value: Any) -> None:
        """Set a user attribute of the study, if it is new."""
        if name not in self._attributes or self._attributes[name] != value:
            self._study.set_user_attr(name, value)
            self._attributes[name] = value


def delete_optuna_study(store: Store, study: StudyRecord) -> None:
    """Delete the Optuna study of a study, if there is one."""
    import optuna

    with warnings.catch_warnings(), store.explained():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with store.alone():
            storage = optuna.storages.RDBStorage(store.url)
        with contextlib.suppress(KeyError):  # no search has begun, or a kill came before it did
            optuna.delete_study(study_name=name_of(study), storage=storage)


def name_of(study: StudyRecord) -> str:
    """Return the name of the Optuna study: script, budget and the study's identifier."""
    memory = study.key.memory
    budget = format_size(memory) if memory is not None else "whole device"
    return f"{study.script.target}, {budget} ({study.id})"


def _attributes(trial: TrialRecord) -> dict[str, Any]:
    """Return the user attributes of an Optuna trial: what a person looks for, and the report."""
    report, measured = trial.report, trial.measurement
    assert isinstance(report, TrialReport), "a finished trial has a report"
    found: dict[str, Any] = {
        "verdict": str(report.verdict),
        "description": str(report.best or report.plan),
        "launch": trial.launch,
        "versions": dict(trial.versions),
        Attribute.REPORT: to_json(report),
    }
    if report.reason:
        found["reason"] = report.reason
    if report.blamed:
        found["blamed"] = report.blamed
    if measured is not None:
        found |= {
            "samples_per_second": measured.samples_per_second,
            "peak_device_bytes": measured.peak_device,
            "peak_reserved_bytes": measured.peak_reserved,
            "peak_allocated_bytes": measured.peak_allocated,
        }
    return found
