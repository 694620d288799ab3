"""Finds studies and trials by the names that people write, and compares them.

A study is named by the beginning of its identifier: ``3f9c``. A trial is named by its study and its
number: ``3f9c/12``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autofit.analysis.ranking import StudySnapshot, differences, result_of
from autofit.analysis.result import Result
from autofit.analysis.verdicts import best_plan
from autofit.exceptions import UsageError
from autofit.plan import Plan
from autofit.storage import Purpose, State, Store, StudyRecord, TrialRecord, script_path
from autofit.text import did_you_mean
from autofit.worker.records.trials import Measurement, Script


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStudy:
    """A study, its trials and its best result."""

    study: StudyRecord
    trials: tuple[TrialRecord, ...]
    """All trials by number, those that run or were interrupted included."""
    result: Result | None
    """``None`` if no plan fits."""
    winner: TrialRecord | None
    """The trial that measured the result."""

    @property
    def searched(self) -> int:
        """Number of finished trials of the search, without confirmation runs."""
        finished = (trial for trial in self.trials if trial.state is State.FINISHED)
        return sum(trial.purpose is Purpose.SEARCH for trial in finished)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: a trial, or a study with the trial of its best plan."""

    study: StudyRecord
    trial: TrialRecord | None
    """``None`` for a study in which no plan fits."""

    @property
    def plan(self) -> Plan | None:
        """The plan with its measured numbers."""
        return None if self.trial is None else best_plan(self.trial)

    @property
    def measurement(self) -> Measurement | None:
        """The figures of the plan, if it was measured."""
        return None if self.trial is None else self.trial.measurement


def stored_study(store: Store, study: StudyRecord) -> StoredStudy:
    """Return a study with its trials and its best result."""
    trials = store.trials(study)
    result = result_of(store, study)
    now = StudySnapshot(trials, study.budget, prefer=study.prefer)
    winner = now.winner if result is not None else None
    return StoredStudy(study=study, trials=trials, result=result, winner=winner)


def study_named(store: Store, name: str | None) -> StudyRecord:
    """Return the study whose identifier is ``name`` or begins with it; ``None`` for the newest.

    Raises ``UsageError`` if there is no such study, or if there are several.
    """
    studies = {study.id: study for study in store.studies()}
    if not studies:
        raise UsageError("the store has no study: run `autofit search` first")
    if name is None:
        return max(studies.values(), key=lambda study: study.opened)
    if name in studies:
        return studies[name]
    found = [study for study in studies.values() if name and study.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        named = ", ".join(study.id for study in found)
        raise UsageError(f"{name!r} is the beginning of several studies: {named}; write more of it")
    hint = did_you_mean(name, studies) or "`autofit history` lists all studies"
    raise UsageError(f"the store has no study {name!r}; {hint}")


def study_of_script(store: Store, script: Script, ranks: int | None = None) -> StudyRecord:
    """Return the newest study that differs least from ``script``.

    ``ranks``: ranks of a training, if known. Raises ``UsageError`` if the script has no study.
    """
    studies = store.studies(script_path(script))
    if not studies:
        raise UsageError(f"no study of {script.target} is stored: run `autofit search` first")
    return min(studies, key=lambda study: len(differences(study.key, script, ranks)))


def side_named(store: Store, name: str) -> Side:
    """Return the study or the trial called ``name``: ``"3f9c"`` or ``"3f9c/12"``.

    Raises ``UsageError`` if there is none.
    """
    beginning, slash, number = name.partition("/")
    study = study_named(store, beginning)
    if not slash:
        return Side(study=study, trial=stored_study(store, study).winner)
    return Side(study=study, trial=_trial(study, store.trials(study), number))


def _trial(study: StudyRecord, trials: Sequence[TrialRecord], number: str) -> TrialRecord:
    for trial in trials:
        if str(trial.number) == number:
            return trial
    known = f"0 to {trials[-1].number}" if trials else "none"
    raise UsageError(f"study {study.id} has no trial {number!r}; its trials: {known}")
