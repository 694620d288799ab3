"""The Pareto frontier of a study: speed against peak memory, from the stored measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autofit.analysis.verdicts import best_plan, corrected, solved, tainted
from autofit.facts import Facts
from autofit.plan import Plan
from autofit.storage import Purpose, State, Store, StudyRecord, TrialRecord
from autofit.worker.records.trials import HORIZON, Measurement, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A measured plan."""

    plan: Plan
    """The plan; its micro-batch size is a number if the batch is split."""
    measurement: Measurement
    """The figures of the plan; its peak is ``measurement.peak_device``."""
    confirmed: bool
    """Whether a confirmation run in a new process measured it."""


def frontier(store: Store, study: StudyRecord, horizon: int = HORIZON) -> tuple[Point, ...]:
    """Return the Pareto frontier of a study, the fastest point first.

    Each micro-batch size that a finished trial measured is a point. A point is left out if another
    one is at least as fast and needs no more memory. Only a confirmed point can displace a
    confirmed one, because the search measures few steps. The result is empty if nothing was
    measured or the script itself failed::

        with Store("autofit.db", create=False) as store:
            for point in frontier(store, store.studies()[0]):
                print(point.plan, point.measurement.samples_per_second, point.confirmed)

    ``horizon``: the optimizer steps over which the time to compile is charged.
    Raises ``StorageError`` if the store cannot be read.
    """
    trials = store.trials(study, state=State.FINISHED)
    if any(trial.verdict is Verdict.SCRIPT_FAILED for trial in trials):
        return ()
    return pareto(points(trials, study.budget, study.facts), horizon)


def pareto(measured: Iterable[Point], horizon: int = HORIZON) -> tuple[Point, ...]:
    """Return the points that ``frontier`` keeps, the fastest first."""

    def order(point: Point) -> tuple[float, int]:
        return -point.measurement.charged(horizon), point.measurement.peak_device

    found: list[Point] = []
    for point in sorted(measured, key=order):
        faster = (each for each in found if each.confirmed or not point.confirmed)
        peak = point.measurement.peak_device
        if all(peak < each.measurement.peak_device for each in faster):
            found.append(point)
    return tuple(found)


def points(
    trials: Sequence[TrialRecord], budget: int, facts: Facts | None = None
) -> Iterator[Point]:
    """Yield a point for each measurement of sound plans.

    The confirmation runs of a plan replace its measurements in the search. If none of them fitted,
    the plan is left out, and so are its larger micro-batch sizes after an out-of-memory error.
    Plans are also left out if they have levels that drifted or were refused in another trial. A
    confirmed plan has passed the comparison itself, so it stays.

    Args:
        trials: All finished trials of a study.
        budget: Bytes of a device during the search.
        facts: What is known of the script; it tells which size is the whole batch.
    """
    again = [trial for trial in trials if trial.purpose is Purpose.CONFIRM]
    searched = [trial for trial in trials if trial.purpose is Purpose.SEARCH]
    confirmed = {plan: found for trial in again for plan, found in _sizes(trial, facts)}
    for plan, found in confirmed.items():
        yield Point(plan=plan, measurement=found, confirmed=True)
    unsound = [
        trial.report
        for trial in trials
        if trial.verdict in (Verdict.DRIFTED, Verdict.REFUSED) and trial.report is not None
    ]
    repeated = {*confirmed, *(trial.plan for trial in again)}
    for trial in (corrected(each, again, budget) for each in searched):
        for plan, found in _sizes(trial, facts):
            if plan not in repeated and not tainted(plan, unsound, searched):
                yield Point(plan=plan, measurement=found, confirmed=False)


def _sizes(trial: TrialRecord, facts: Facts | None) -> Iterator[tuple[Plan, Measurement]]:
    """Yield each plan that a trial measured: one for each pair of numbers that it tried."""
    if trial.verdict is not Verdict.MEASURED or trial.report is None:
        return
    *others, last = trial.report.measurements
    if solved(trial.plan):
        for each in others:
            yield each.plan(trial.plan).whole(facts or Facts()), each
    yield best_plan(trial), last
