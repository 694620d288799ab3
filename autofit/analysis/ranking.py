"""Ranks the trials of a study and finds its best plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autofit.analysis.frontier import Point, frontier, pareto, points
from autofit.analysis.result import Result
from autofit.analysis.verdicts import best_plan, corrected, fits, margin, tainted, variation
from autofit.exceptions import NothingFits, UsageError
from autofit.plan import Plan
from autofit.storage import Purpose, State, Store, StudyKey, StudyRecord, TrialRecord, script_path
from autofit.strategies import Fidelity
from autofit.units import exact_size, format_size
from autofit.worker.records.phases import Seconds, added
from autofit.worker.records.trials import HORIZON, Measurement, Script, TrialReport, Verdict

_PEAKS = 50.0
"""Peaks within about 2 % (one part in so many) count as equal."""
CLEARLY_FASTER = 0.1
"""A plan is confirmed late if the search measured it faster than the winner by this share."""


@dataclass(frozen=True)
class StudySnapshot:
    """All trials of a study at one moment, and what follows from them."""

    trials: tuple[TrialRecord, ...]
    budget: int
    """Bytes per device."""
    horizon: int = HORIZON
    """Optimizer steps over which the time to compile is charged."""
    prefer: str = "fidelity"
    """Which of equally fast plans is kept, as ``--prefer``."""

    @cached_property
    def all_finished(self) -> tuple[TrialRecord, ...]:
        """The finished trials, confirmation runs included."""
        return tuple(trial for trial in self.trials if trial.state is State.FINISHED)

    @cached_property
    def confirmations(self) -> tuple[TrialRecord, ...]:
        """The finished confirmation runs."""
        return tuple(t for t in self.all_finished if t.purpose is Purpose.CONFIRM)

    @cached_property
    def searched(self) -> tuple[tuple[TrialRecord, TrialRecord], ...]:
        """The search's finished trials, each as it was and as its confirmation run corrects it."""
        found = (trial for trial in self.all_finished if trial.purpose is Purpose.SEARCH)
        return tuple((t, corrected(t, self.confirmations, self.budget)) for t in found)

    @cached_property
    def finished(self) -> tuple[TrialRecord, ...]:
        """The search's finished trials, corrected."""
        return tuple(after for _, after in self.searched)

    @cached_property
    def baseline(self) -> Verdict | None:
        """The verdict of the neutral plan, if it has one."""
        return next((trial.verdict for trial in self.finished if trial.plan.neutral), None)

    @cached_property
    def drifted(self) -> tuple[TrialReport, ...]:
        """The reports of the confirmation runs that drifted."""
        found = (t.report for t in self.confirmations if t.verdict is Verdict.DRIFTED)
        return tuple(report for report in found if report is not None)

    @cached_property
    def running(self) -> tuple[TrialRecord, ...]:
        """The search's trials without a verdict."""
        states = (t for t in self.trials if t.state is State.RUNNING)
        return tuple(trial for trial in states if trial.purpose is Purpose.SEARCH)

    @cached_property
    def ranked(self) -> list[TrialRecord]:
        """The finished trials that fit, the fastest first."""
        return ranked(self.finished, self.budget, self.horizon)

    @cached_property
    def ranked_sound(self) -> list[TrialRecord]:
        """The trials of ``ranked`` without a level that drifted in a confirmation run."""
        return ranked_sound((*self.finished, *self.confirmations), self.budget, self.horizon)

    @cached_property
    def hardly_fit(self) -> frozenset[Plan]:
        """The plans whose confirmation run was slower because memory was nearly full."""
        changed = ((best_plan(b), a) for b, a in self.searched if a is not b)
        return frozenset(p for p, a in changed if best_plan(a) == p and fits(a, self.budget))

    @property
    def ranked_before_confirmation(self) -> list[TrialRecord]:
        """``ranked_sound`` as if no confirmation run had been short of memory."""
        return ranked_sound(self.all_finished, self.budget, self.horizon)

    @cached_property
    def winner(self) -> TrialRecord | None:
        """The trial whose plan is the result; ``None`` if no plan fits.

        If confirmation runs fit, the winner is one of them: of those that are as fast as the
        fastest, within ``margin``, the one that is preferred (``flags.PREFERENCES``). Otherwise it
        is the fastest trial of the search whose plan has no confirmation run and did not drift.
        """
        again = self.fitted_again
        if not again:
            return next(iter(self._unconfirmed), None)
        fastest = max(again, key=lambda trial: _speed(trial, self.horizon))
        if self.prefer == "speed":
            return fastest
        tied = [trial for trial in again if _as_fast(trial, fastest, self.horizon)]
        return min(tied, key=_ORDERS[self.prefer])

    @property
    def preferred_unconfirmed(self) -> Plan | None:
        """An unconfirmed plan that is preferred to the confirmed winner and was as fast.

        Of several, the one that is preferred. It needs a confirmation run, because speeds measured
        at different times are not comparable. ``None`` if there is no such plan, or if the winner
        has no confirmation run.
        """
        winner = self.winner
        if winner is None or winner.purpose is not Purpose.CONFIRM or self.prefer == "speed":
            return None
        order = _ORDERS[self.prefer]
        tied = [trial for trial in self._unconfirmed if _as_fast(trial, winner, self.horizon)]
        preferred = min(tied, key=order, default=winner)
        return best_plan(preferred) if order(preferred)[:1] < order(winner)[:1] else None

    @property
    def faster_unconfirmed(self) -> Plan | None:
        """The fastest unconfirmed plan if it may beat the confirmed winner, else ``None``.

        Its trial must be faster by ``CLEARLY_FASTER`` and by ``margin``, because the speeds of a
        few steps vary.
        """
        winner, left = self.winner, next(iter(self._unconfirmed), None)
        if winner is None or winner.purpose is not Purpose.CONFIRM or left is None:
            return None
        if left.measurement is None or winner.measurement is None:
            return None
        more = max(CLEARLY_FASTER, margin(left.measurement, winner.measurement))
        faster = _speed(left, self.horizon) > (1 + more) * _speed(winner, self.horizon)
        return best_plan(left) if faster else None

    @cached_property
    def _unconfirmed(self) -> list[TrialRecord]:
        """The trials of ``ranked_sound`` whose plans have no confirmation run."""
        again = {trial.plan for trial in self.confirmations}
        return [trial for trial in self.ranked_sound if best_plan(trial) not in again]

    def confirmed(self, plan: Plan, *verdicts: Verdict) -> list[TrialRecord]:
        """Return the confirmation runs of ``plan``; with ``verdicts``, only those that have one."""
        mine = [trial for trial in self.confirmations if trial.plan == plan]
        return [trial for trial in mine if not verdicts or trial.verdict in verdicts]

    @property
    def fitted_again(self) -> list[TrialRecord]:
        """The confirmation runs that fitted."""
        return [trial for trial in self.confirmations if fits(trial, self.budget)]

    def fitted(self, plan: Plan) -> bool:
        """Return whether ``plan`` fitted in a confirmation run."""
        return any(fits(each, self.budget) for each in self.confirmed(plan))


def best(
    storage: str,
    script: Script | None = None,
    *,
    ranks: int | None = None,
    memory: int | None = None,
    say: Callable[[str], object] | None = None,
) -> tuple[Result, str]:
    """Return the best result of the study that matches ``script``, and a line that names the study.

    Without ``script``, the newest study is used. ``ranks`` is the number of ranks of a training, if
    known.

    ``memory``: bytes per device. The result is then the fastest known plan with a peak within them.
    A study that was searched with exactly this budget is preferred. Otherwise all studies count
    that differ only in their budget.

    ``say`` receives a line for each record that cannot be read, and one if a search can still
    change the result. Raises ``UsageError`` if no study matches, and ``NothingFits`` if no known
    plan fits ``memory``.
    """
    say = say or (lambda line: None)
    with Store(storage, create=False) as store:
        store.say = say
        studies = store.studies(script_path(script) if script else None)
        found = [(study, result) for study in studies if (result := result_of(store, study))]
        if not found:
            name = f" for {script.target}" if script else ""
            raise UsageError(f"no plan is stored{name}: run `autofit search` first")
        if script is None:
            study, result = max(found, key=lambda pair: pair[0].opened)
        else:
            study, result = min(
                found, key=lambda pair: len(differences(pair[0].key, script, ranks))
            )
        if memory is not None:
            study, result = _within(memory, store, found, study.key)
    if (doubt := _doubt(result, study.budget)) is not None:
        say(doubt)
    differs = ", ".join(differences(study.key, script, ranks)) if script else ""
    return result, f"study {study.id}: {study.script}" + (f" ({differs})" if differs else "")


def _within(
    memory: int, store: Store, found: Sequence[tuple[StudyRecord, Result]], key: StudyKey
) -> tuple[StudyRecord, Result]:
    """Return the fastest result within ``memory`` bytes, and its study.

    ``found``: the studies with a result, the newest first. Those that differ from ``key`` only in
    their budget are used; of several with the same key, the newest.
    """
    wanted = replace(key, memory=None)
    alike = {s.key: (s, r) for s, r in reversed(found) if replace(s.key, memory=None) == wanted}
    fitting = [
        (study, result)
        for study, _ in alike.values()
        if (result := result_of(store, study, memory=memory)) is not None
    ]
    if not fitting:
        known: list[Result | Point] = [result for _, result in alike.values()]
        known += (point for study, _ in alike.values() for point in frontier(store, study))
        leanest = min(known, key=lambda each: each.measurement.peak_device)
        raise NothingFits(
            f"no known plan fits {format_size(memory)}: the one with the lowest peak,"
            f" {format_size(leanest.measurement.peak_device)}, is {leanest.plan};"
            f" try `autofit search` with --memory {exact_size(memory)}"
        )
    asked = [pair for pair in fitting if pair[0].key.memory == memory]
    return max(asked or fitting, key=lambda pair: pair[1].measurement.charged(HORIZON))


def _doubt(result: Result, searched: int) -> str | None:
    """Return a line if a search can still change the result, else ``None``.

    ``searched``: the budget of the study, in bytes.
    """
    asked = f"--memory {exact_size(result.budget)}"
    if result.budget < searched:
        peak = format_size(result.measurement.peak_device)
        return (
            f"the peak of {peak} was measured under a budget of {format_size(searched)};"
            f" `autofit search` with {asked} confirms what fits"
        )
    if result.budget > searched:
        return (
            f"this is the best plan within {format_size(searched)};"
            f" `autofit search` with {asked} may find a faster one"
        )
    if not result.confirmed and not result.plan.neutral:
        return (
            "the search ended before it confirmed this plan in a new process;"
            " the same `autofit search` again does so"
        )
    return None


def result_of(
    store: Store, study: StudyRecord, horizon: int = HORIZON, *, memory: int | None = None
) -> Result | None:
    """Return the best result of a study; ``None`` if no plan fits or the script itself failed.

    ``memory``: bytes per device. If the study's best plan needs more, the result is the fastest
    plan of its frontier that does not.
    """
    trials = store.trials(study, state=State.FINISHED)
    if any(trial.verdict is Verdict.SCRIPT_FAILED for trial in trials):
        return None  # earlier measurements are of a script that does not work
    point = _best_point(trials, study, horizon, memory)
    if point is None:
        return None
    as_is = [trial for trial in trials if trial.plan.neutral]
    baseline = next((t for t in as_is if t.purpose is Purpose.SEARCH), None)
    again = next((t for t in as_is if t.purpose is Purpose.CONFIRM and t.measurement), baseline)
    launches = {trial.launch for trial in trials}
    short = {t.launch for t in trials if t.verdict is Verdict.OUT_OF_MEMORY}
    return Result(
        study=study.id,
        script=study.script,
        hardware=study.hardware,
        budget=study.budget if memory is None else memory,
        plan=point.plan,
        measurement=point.measurement,
        confirmed=point.confirmed,
        fidelity=str(point.plan.fidelity(study.facts)),
        baseline=again.measurement if again else None,
        baseline_verdict=(baseline.verdict if baseline else None) or Verdict.INTERRUPTED,
        variation=variation(_of_plan(trials, point.plan), _of_plan(trials, Plan())),
        trials=sum(trial.purpose is Purpose.SEARCH for trial in trials),
        launches=len(launches),
        launches_out_of_memory=len(short),
        search_seconds=study.seconds,
        seconds_by_phase=seconds_by_phase(study, trials),
        versions=dict(study.versions),
        ranks=study.key.gpus,
        facts=study.facts,
        elsewhere=_elsewhere(trials, study.budget if memory is None else memory, point.plan),
    )


def seconds_by_phase(study: StudyRecord, trials: Sequence[TrialRecord]) -> Seconds:
    """Return the seconds of a study by phase, those of its trials included."""
    reports = (trial.report for trial in trials)
    return added(study.seconds_by_phase, *(each.seconds_by_phase for each in reports if each))


def _elsewhere(
    trials: Sequence[TrialRecord], budget: int, plan: Plan
) -> tuple[Plan, Measurement] | None:
    """Return the fastest plan on another number of devices than ``plan``, and its figures."""
    for trial in ranked_sound(trials, budget):
        if trial.plan.ranks != plan.ranks and trial.measurement is not None:
            return best_plan(trial), trial.measurement
    return None


def _best_point(
    trials: Sequence[TrialRecord], study: StudyRecord, horizon: int, memory: int | None
) -> Point | None:
    """Return the winner of a study, or the fastest plan within ``memory`` if it needs more."""
    known = []
    winner = StudySnapshot(tuple(trials), study.budget, horizon, study.prefer).winner
    if winner is not None and winner.measurement is not None:
        confirmed, plan = winner.purpose is Purpose.CONFIRM, best_plan(winner)
        known.append(Point(plan=plan, measurement=winner.measurement, confirmed=confirmed))
    if memory is None:
        return next(iter(known), None)
    known += pareto(points(trials, study.budget, study.facts), horizon)
    return next((each for each in known if each.measurement.peak_device <= memory), None)


def _of_plan(trials: Sequence[TrialRecord], plan: Plan) -> list[Measurement]:
    """Return the measurements of ``plan`` at its size: by the search and by confirmation runs."""
    mine = (trial.measurement for trial in trials if best_plan(trial) == plan)
    return [each for each in mine if each is not None]


def extent(plan: Plan) -> tuple[Fidelity, int, bool]:
    """Return how much a plan changes, to compare plans: fidelity first, then number of levels.

    A plan that splits the batch changes more than another one with as many levels.
    """
    return plan.fidelity(), len(plan.changes), plan.splits


def ranked(trials: Sequence[TrialRecord], budget: int, horizon: int = HORIZON) -> list[TrialRecord]:
    """Return the search's trials that fit, fastest first.

    ``horizon``: the optimizer steps over which the time to compile is charged.
    """
    measured = [t for t in trials if t.purpose is Purpose.SEARCH and fits(t, budget)]
    return sorted(measured, key=lambda trial: _speed(trial, horizon), reverse=True)


def ranked_sound(
    trials: Sequence[TrialRecord], budget: int, horizon: int = HORIZON
) -> list[TrialRecord]:
    """Return those of ``ranked`` without a level that drifted in a confirmation run.

    ``trials``: all finished trials, confirmation runs included.
    """
    again = [t for t in trials if t.purpose is Purpose.CONFIRM and t.verdict is Verdict.DRIFTED]
    drifted = [trial.report for trial in again if trial.report is not None]
    searched = [trial for trial in trials if trial.purpose is Purpose.SEARCH]
    fitting = ranked(trials, budget, horizon)
    return [trial for trial in fitting if not tainted(best_plan(trial), drifted, searched)]


def _speed(trial: TrialRecord, horizon: int = HORIZON) -> float:
    return trial.measurement.charged(horizon) if trial.measurement else 0.0


def _as_fast(trial: TrialRecord, other: TrialRecord, horizon: int) -> bool:
    """Return whether a measured trial is not slower than another by more than ``margin``."""
    assert trial.measurement is not None, "it fits"
    assert other.measurement is not None, "it fits"
    more = 1 + margin(trial.measurement, other.measurement)
    return more * _speed(trial, horizon) >= _speed(other, horizon)


def _extent(trial: TrialRecord) -> tuple[Fidelity, int, bool]:
    return extent(best_plan(trial))


def _peak(trial: TrialRecord) -> int:
    return trial.measurement.peak_device if trial.measurement else 0


_ORDERS: dict[str, Callable[[TrialRecord], tuple[Any, ...]]] = {
    "fidelity": lambda trial: (_extent(trial), _peak(trial)),
    "memory": lambda trial: (round(_PEAKS * math.log(1 + _peak(trial))), _extent(trial)),
}
"""Orders plans that are equally fast, the preferred one first."""


def differences(key: StudyKey, script: Script, ranks: int | None) -> list[str]:
    """Return the differences between a study and the given script, in words.

    If the script is given without a launcher, the variables of the study's launcher are accepted.
    """
    now = StudyKey.of(script, gpu=key.gpu, gpus=key.gpus, memory=key.memory, allow=key.allow)
    found = []
    if key.digest != now.digest:
        found.append("the file was edited since")
    if key.args != now.args:
        found.append(f"searched with arguments {' '.join(key.args) or '(none)'}")
    if ranks is not None and key.gpus != ranks:
        found.append(f"searched with {key.gpus} ranks a training")
    if script.launcher and key.environment != now.environment:
        variables = [f"{k}={v}" for k, v in key.environment if (k, v) not in now.environment]
        found.append(f"searched with {' '.join(variables) or 'nothing set by a launcher'}")
    return found
