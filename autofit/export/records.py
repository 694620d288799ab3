"""Converts stored studies and trials to plain data, for ``autofit history --json``.

Later versions only add keys. Bytes and seconds are plain numbers; times are in UTC (ISO 8601).
"""

from __future__ import annotations

from typing import Any

from autofit.analysis.ranking import seconds_by_phase
from autofit.analysis.studies import Side, StoredStudy
from autofit.analysis.verdicts import best_plan
from autofit.export.as_json import figures, script_document
from autofit.export.load import PLAN
from autofit.storage import StudyRecord, TrialRecord
from autofit.strategies import AS_IS, NAMES


def study_document(found: StoredStudy) -> dict[str, Any]:
    """Return a study with its best plan; ``best`` is ``None`` if no plan fits."""
    result, study = found.result, found.study
    best = None
    if result is not None and found.winner is not None:
        best = {
            "trial": found.winner.number,
            PLAN: result.plan.levels,
            **figures(result.measurement),
            "confirmed": result.confirmed,
        }
    return {
        **_study(study),
        "trials": found.searched,
        "launches": study.launches,
        "search_seconds": study.seconds,
        "seconds_by_phase": dict(seconds_by_phase(study, found.trials)),
        "created": study.created.isoformat(),
        "last_search": study.opened.isoformat(),
        "best": best,
    }


def _study(study: StudyRecord) -> dict[str, Any]:
    return {
        "study": study.id,
        "script": script_document(study.script),
        "device": study.hardware.name,
        "ranks": study.key.gpus,
        "budget_bytes": study.budget,
        "memory": study.key.memory,
        "allow": study.key.allow,
    }


def trial_document(trial: TrialRecord) -> dict[str, Any]:
    """Return a trial with its verdict, its reason and its figures if it was measured."""
    report = trial.report
    return {
        "trial": trial.number,
        "purpose": str(trial.purpose),
        "state": str(trial.state),
        PLAN: best_plan(trial).levels,
        "verdict": None if report is None else str(report.verdict),
        "reason": "" if report is None else report.reason,
        "blamed": None if report is None else report.blamed,
        "budget_bytes": trial.budget,
        "launch": trial.launch,
        "created": trial.created.isoformat(),
        "ended": None if trial.ended is None else trial.ended.isoformat(),
        "seconds_by_phase": {} if report is None else dict(report.seconds_by_phase),
        "figures": None if trial.measurement is None else figures(trial.measurement),
    }


def history_document(found: StoredStudy) -> dict[str, Any]:
    """Return a study with all its trials, and the levels that it left out."""
    return {
        **study_document(found),
        "all_trials": [trial_document(trial) for trial in found.trials],
        "left_out": [
            {"strategy": strategy, "level": level, "reason": reason}
            for strategy, level, reason in found.study.left_out
        ],
    }


def comparison_document(one: Side, other: Side) -> dict[str, Any]:
    """Return both sides, the levels that differ, and the ratios of the second to the first."""
    levels = [side.plan.levels if side.plan else {} for side in (one, other)]
    pairs = {name: [each.get(name, AS_IS) for each in levels] for name in NAMES}
    a, b = one.measurement, other.measurement
    ratios: dict[str, float | None] = {"speed_ratio": None, "peak_ratio": None}
    if a is not None and b is not None:
        ratios = {
            "speed_ratio": b.samples_per_second / a.samples_per_second,
            "peak_ratio": b.peak_device / a.peak_device,
        }
    return {
        "sides": [
            {
                **_study(side.study),
                "trial": None if side.trial is None else trial_document(side.trial),
            }
            for side in (one, other)
        ],
        "differing": {name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        **ratios,
    }
