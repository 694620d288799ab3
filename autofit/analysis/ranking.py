"""The best of a study, out of the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autofit.analysis.result import Result
from autofit.analysis.verdicts import TIE, best_plan, corrected, fits, tainted
from autofit.exceptions import UsageError
from autofit.plan import Plan
from autofit.storage import Purpose, State, Store, StudyKey, StudyRecord, TrialRecord, script_path
from autofit.worker.records.trials import (
    HORIZON,
    Script,
    Verdict,
)

FAR = 0.1
"""By how much another plan was faster than the kept one turned out, for it to be measured again."""
LEANER = 0.05
"""What a plan must save in memory to be preferred to one that is as fast."""


def best(
    storage: str,
    script: Script | None = None,
    *,
    ranks: int | None = None,
    say: Callable[[str], object] | None = None,
) -> tuple[Result, str]:
    """Return the best result of the study that matches ``script``, and a line that names the study.

    Without ``script``, the newest study is used. ``ranks`` is the number of ranks of a training, if
    known. ``say`` receives a line for each record that cannot be read.
    Raises ``UsageError`` if no study matches.
    """
    with Store(storage, create=False) as store:
        store.say = say
        studies = store.studies(script_path(script) if script else None)
        found = [(study, result) for study in studies if (result := result_of(store, study))]
    if not found:
        name = f" for {script.target}" if script else ""
        raise UsageError(f"no plan is stored{name}: run `autofit search` first")
    if script is None:
        study, result = max(found, key=lambda pair: pair[0].opened)
        return result, f"study {study.id}: {study.script}"
    study, result = min(found, key=lambda pair: len(_differences(pair[0].key, script, ranks)))
    differs = ", ".join(_differences(study.key, script, ranks))
    return result, f"study {study.id}: {study.script}" + (f" ({differs})" if differs else "")


def result_of(store: Store, study: StudyRecord, horizon: int = HORIZON) -> Result | None:
    """Return the best of a study; ``None`` where nothing fits, or the script itself fails."""
    trials = store.trials(study, state=State.FINISHED)
    if any(trial.verdict is Verdict.SCRIPT_FAILED for trial in trials):
        return None  # what was measured before it failed is worth nothing
    winner = winning(trials, study.budget, horizon)
    if winner is None or winner.report is None or winner.report.measurement is None:
        return None
    plan = best_plan(winner)
    as_is = [trial for trial in trials if trial.plan.neutral]
    baseline = next((t for t in as_is if t.purpose is Purpose.SEARCH), None)
    again = next((t for t in as_is if t.purpose is Purpose.CONFIRM and t.measurement), baseline)
    launches = {trial.launch for trial in trials}
    short = {t.launch for t in trials if t.verdict is Verdict.OUT_OF_MEMORY}
    return Result(
        study=study.id,
        script=study.script,
        hardware=study.hardware,
        budget=study.budget,
        plan=plan,
        measurement=winner.report.measurement,
        fidelity=str(plan.fidelity(study.facts)),
        baseline=again.measurement if again else None,
        baseline_verdict=(baseline.verdict if baseline else None) or Verdict.INTERRUPTED,
        trials=sum(trial.purpose is Purpose.SEARCH for trial in trials),
        launches=len(launches),
        launches_out_of_memory=len(short),
        search_seconds=study.seconds,
        versions=dict(study.versions),
        ranks=study.key.gpus,
    )


def winning(
    trials: Sequence[TrialRecord], budget: int, horizon: int = HORIZON
) -> TrialRecord | None:
    """Return the trial to keep: of those measured again, else the fastest that fits and stands.

    Of those that are as fast as the fastest within ``TIE``, the one that needs least memory. None
    that did not fit when it was measured again.
    """
    confirmed = [trial for trial in trials if trial.purpose is Purpose.CONFIRM]
    again = [trial for trial in confirmed if fits(trial, budget)]
    if not again:
        return next(iter(_left(trials, budget, horizon)), None)
    fastest = max(_speed(trial, horizon) for trial in again)
    tied = [trial for trial in again if _speed(trial, horizon) >= (1 - TIE) * fastest]
    return min(tied, key=_peak)


def rivals(
    trials: Sequence[TrialRecord], winner: TrialRecord, budget: int, horizon: int = HORIZON
) -> list[TrialRecord]:
    """Return the search's trials that tie with ``winner`` and need clearly less memory.

    Only these may take its place once all are measured again; the fastest first.
    """
    enough = (1 - TIE) * _speed(winner, horizon)
    tied = [t for t in ranked(trials, budget, horizon) if _speed(t, horizon) >= enough]
    return [trial for trial in tied if _peak(trial) <= (1 - LEANER) * _peak(winner)]


def finalists(
    trials: Sequence[TrialRecord], winner: TrialRecord, budget: int, horizon: int, most: int
) -> list[Plan]:
    """Return the winner's plan and those that may take its place, ``most`` in all."""
    return [best_plan(trial) for trial in (winner, *rivals(trials, winner, budget, horizon))[:most]]


def overtaken(trials: Sequence[TrialRecord], budget: int, horizon: int = HORIZON) -> bool:
    """Return whether the script as it is was faster than what is kept turned out to be later.

    Then it is measured again too: figures from two times on a machine are not compared.
    """
    winner = winning(trials, budget, horizon)
    again = any(t.plan.neutral and t.purpose is Purpose.CONFIRM for t in trials)
    if winner is None or winner.purpose is not Purpose.CONFIRM or again:
        return False
    as_is = next((t for t in ranked(trials, budget, horizon) if t.plan.neutral), None)
    return as_is is not None and _speed(as_is, horizon) > _speed(winner, horizon)


def overtaking(trials: Sequence[TrialRecord], budget: int, horizon: int = HORIZON) -> Plan | None:
    """Return the fastest plan that may be faster than what is kept turned out to be, if one may.

    Not measured again so far, and faster by ``FAR`` when it was: a few steps may scatter by more.
    """
    winner = winning(trials, budget, horizon)
    if winner is None or winner.purpose is not Purpose.CONFIRM:
        return None
    enough = (1 + FAR) * _speed(winner, horizon)
    left = _left(trials, budget, horizon)
    return best_plan(left[0]) if left and _speed(left[0], horizon) > enough else None


def _left(trials: Sequence[TrialRecord], budget: int, horizon: int) -> list[TrialRecord]:
    """Return the search's trials whose plans were not measured again and stand, fastest first."""
    confirmed = [trial for trial in trials if trial.purpose is Purpose.CONFIRM]
    again = {trial.plan for trial in confirmed}
    searched = (trial for trial in trials if trial.purpose is Purpose.SEARCH)
    counted = [*confirmed, *(corrected(trial, confirmed, budget) for trial in searched)]
    return [
        trial for trial in ranked_sound(counted, budget, horizon) if best_plan(trial) not in again
    ]


def ranked(trials: Sequence[TrialRecord], budget: int, horizon: int = HORIZON) -> list[TrialRecord]:
    """Return the search's trials that fit, fastest first.

    ``horizon``: the optimizer steps over which the time to compile is charged.
    """
    measured = [t for t in trials if t.purpose is Purpose.SEARCH and fits(t, budget)]
    return sorted(measured, key=lambda trial: _speed(trial, horizon), reverse=True)


def ranked_sound(
    trials: Sequence[TrialRecord], budget: int, horizon: int = HORIZON
) -> list[TrialRecord]:
    """Return those of ``ranked`` that hold nothing that drifted when it was measured again.

    ``trials``: the finished ones, those measured again among them.
    """
    again = [t for t in trials if t.purpose is Purpose.CONFIRM and t.verdict is Verdict.DRIFTED]
    drifted = [trial.report for trial in again if trial.report is not None]
    searched = [trial for trial in trials if trial.purpose is Purpose.SEARCH]
    fitting = ranked(trials, budget, horizon)
    return [trial for trial in fitting if not tainted(best_plan(trial), drifted, searched)]


def _speed(trial: TrialRecord, horizon: int = HORIZON) -> float:
    return trial.measurement.charged(horizon) if trial.measurement else 0.0


def _peak(trial: TrialRecord) -> int:
    return trial.measurement.peak_device if trial.measurement else 0


def _differences(key: StudyKey, script: Script, ranks: int | None) -> list[str]:
    """Return what differs between a study and what is asked now, in words.

    A script given without a launch line is taken as it was launched when it was searched.
    """
    asked = StudyKey.of(script, gpu=key.gpu, gpus=key.gpus, memory=key.memory, allow=key.allow)
    found = []
    if key.digest != asked.digest:
        found.append("the file was edited since")
    if key.args != asked.args:
        found.append(f"searched with arguments {' '.join(key.args) or '(none)'}")
    if ranks is not None and key.gpus != ranks:
        found.append(f"searched with {key.gpus} ranks a training")
    if script.launcher and key.environment != asked.environment:
        found.append(f"searched with {_set(key, asked) or 'nothing set by a launcher'}")
    return found


def _set(key: StudyKey, asked: StudyKey) -> str:
    """Return the variables that a launcher set for a study, and sets otherwise now."""
    return " ".join(f"{k}={v}" for k, v in key.environment if (k, v) not in asked.environment)
