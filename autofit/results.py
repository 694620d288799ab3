"""The best of a study, out of the store."""

from __future__ import annotations

from collections.abc import Sequence

from autofit.exceptions import UsageError
from autofit.progress import Result
from autofit.storage import Purpose, State, Store, StudyKey, StudyRecord, TrialRecord, script_path
from autofit.worker.records import Script, Verdict


def best(storage: str, script: Script | None = None) -> tuple[Result, str]:
    """Return the best of the study that matches ``script``, and a line that says which.

    Without a script: of the study opened last. Raises ``UsageError`` when nothing matches.
    """
    with Store(storage, create=False) as store:
        studies = store.studies(script_path(script) if script else None)
        found = [(study, result) for study in studies if (result := result_of(store, study))]
    if not found:
        name = f" for {script.target}" if script else ""
        raise UsageError(f"no plan is stored{name}: run `autofit search` first")
    if script is None:
        study, result = max(found, key=lambda pair: pair[0].opened)
        return result, f"study {study.id}: {study.script}"
    study, result = min(found, key=lambda pair: len(_differences(pair[0].key, script)))
    differs = ", ".join(_differences(study.key, script))
    return result, f"study {study.id}: {study.script}" + (f" ({differs})" if differs else "")


def result_of(store: Store, study: StudyRecord) -> Result | None:
    """Return the best of a study; ``None`` where nothing fits, or the script itself fails."""
    trials = store.trials(study, state=State.FINISHED)
    if any(trial.verdict is Verdict.SCRIPT_FAILED for trial in trials):
        return None  # what was measured before it failed is worth nothing
    winner = winning(trials, study.budget)
    if winner is None or winner.report is None or winner.report.measurement is None:
        return None
    plan = winner.report.best or winner.plan
    baseline = next((t for t in trials if t.plan.neutral and t.purpose is Purpose.SEARCH), None)
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
        baseline=baseline.measurement if baseline else None,
        baseline_verdict=(baseline.verdict if baseline else None) or Verdict.INTERRUPTED,
        trials=sum(trial.purpose is Purpose.SEARCH for trial in trials),
        launches=len(launches),
        launches_out_of_memory=len(short),
        search_seconds=study.seconds,
        versions=dict(study.versions),
    )


def winning(trials: Sequence[TrialRecord], budget: int) -> TrialRecord | None:
    """Return the trial to keep: the last one confirmed, else the fastest that fits."""
    confirmed = [t for t in trials if t.purpose is Purpose.CONFIRM and fits(t, budget)]
    return confirmed[-1] if confirmed else next(iter(ranked(trials, budget)), None)


def ranked(trials: Sequence[TrialRecord], budget: int) -> list[TrialRecord]:
    """Return the search's trials that fit, fastest first."""
    measured = [t for t in trials if t.purpose is Purpose.SEARCH and fits(t, budget)]
    return sorted(measured, key=_speed, reverse=True)


def fits(trial: TrialRecord, budget: int) -> bool:
    """Return whether a trial was measured within ``budget`` bytes of device memory."""
    measurement = trial.measurement
    measured = trial.verdict is Verdict.MEASURED and measurement is not None
    return measured and measurement is not None and measurement.peak_device <= budget


def _speed(trial: TrialRecord) -> float:
    return trial.measurement.samples_per_second if trial.measurement else 0.0


def _differences(key: StudyKey, script: Script) -> list[str]:
    """Return what differs between a study and what is asked now, in words."""
    asked = StudyKey.of(script, gpu=key.gpu, gpus=key.gpus, memory=key.memory, allow=key.allow)
    found = []
    if key.digest != asked.digest:
        found.append("the file was edited since")
    if key.args != asked.args:
        found.append(f"searched with arguments {' '.join(key.args) or '(none)'}")
    return found
