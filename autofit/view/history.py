"""The tables of ``autofit history``: stored studies, the trials of one, and two side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from autofit.analysis.studies import Side, StoredStudy
from autofit.analysis.verdicts import best_plan
from autofit.storage import Purpose, State, StudyRecord, TrialRecord
from autofit.strategies import AS_IS, NAMES
from autofit.text import printable
from autofit.units import format_duration, format_size
from autofit.view import words
from autofit.worker.records.trials import Verdict

DIFFERENT = "*"
"""Marks a row of a comparison whose two values differ."""


def table(titles: Sequence[str], *, right: Iterable[str] = ()) -> Table:
    """Return an empty table; the columns ``right`` hold numbers. No cell is read as markup."""
    found = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    numbers = set(right)
    for title in titles:
        found.add_column(title, justify="right" if title in numbers else "left", overflow="fold")
    return found


def add(to: Table, *cells: str, style: str = "") -> None:
    """Add a row of plain text to a table."""
    to.add_row(*(Text(printable(cell)) for cell in cells), style=style)


# --- studies ----------------------------------------------------------------------------------


def studies(found: Iterable[StoredStudy]) -> Table:
    """Return the table of all studies."""
    made = table(
        ("study", "script", "device", "budget", "trials", "best plan", "samples/s", "last search"),
        right=("trials", "samples/s"),
    )
    for each in found:
        study, result = each.study, each.result
        add(
            made,
            study.id,
            str(study.script),
            device(study),
            format_size(study.budget),
            str(each.searched),
            _nothing(each) if result is None else str(result.plan),
            "-" if result is None else words.rate(result.measurement.samples_per_second),
            day(study.opened),
        )
    return made


def _nothing(found: StoredStudy) -> str:
    """Return why a study has no best plan."""
    if any(trial.verdict is Verdict.SCRIPT_FAILED for trial in found.trials):
        return "the script failed"
    return "no plan fits" if found.searched else "nothing measured"


def device(study: StudyRecord) -> str:
    """Return the devices of one training: ``"2 x NVIDIA H200"``."""
    devices = max(study.key.gpus, study.key.spread)
    return f"{devices} x {study.hardware.name}" if devices > 1 else study.hardware.name


def day(moment: datetime) -> str:
    """Return a moment in local time, to the minute."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M")


# --- one study --------------------------------------------------------------------------------


def head(found: StoredStudy) -> list[str]:
    """Return the lines above the trials of a study."""
    study, origin = found.study, "as requested" if found.study.key.memory is not None else "free"
    return [
        f"study {study.id}: {study.script}",
        f"{device(study)}, budget {format_size(study.budget)} {origin};"
        f" allowed: {words.allowed(study.key.allow)}",
        f"{words.many(found.searched, 'trial')} in {words.many(study.launches, 'launch')},"
        f" {format_duration(study.seconds)};"
        f" first search {day(study.created)}, last {day(study.opened)}",
    ]


TRIALS = ("#", "plan", "samples/s", "vs now", "peak", "verdict")
"""Titles of the table of trials."""


def trials(found: StoredStudy) -> Table:
    """Return the table of the trials of a study, the one of its best plan marked."""
    made = table(TRIALS, right=("#", "samples/s", "vs now", "peak"))
    for trial, (cells, best) in zip(found.trials, trial_rows(found), strict=True):
        measured = trial.verdict is Verdict.MEASURED
        add(made, *cells, style="green" if best else "" if measured else "dim")
    return made


def trial_rows(found: StoredStudy) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield the cells of each trial, and whether it is the one of the best plan."""
    for trial in found.trials:
        best = found.winner is not None and trial.id == found.winner.id
        measured = trial.measurement if trial.verdict is Verdict.MEASURED else None
        cells = (
            str(trial.number),
            str(best_plan(trial)),
            words.speed(measured) if measured else "-",
            versus(trial, baseline(found, trial.purpose)),
            format_size(measured.peak_device) if measured else "-",
            verdict(trial, best=best),
        )
        yield cells, best


def baseline(found: StoredStudy, purpose: Purpose) -> TrialRecord | None:
    """Return the trial with which the speeds of trials are compared, as the live table does.

    Other trials are compared with the script as it is. If that was not measured, they are compared
    with the first plan that fits. If the script as it is has a confirmation run, confirmation runs
    are compared with that one: both are new processes.
    """
    measured = [trial for trial in found.trials if trial.verdict is Verdict.MEASURED]
    search = [trial for trial in measured if trial.purpose is Purpose.SEARCH]
    as_is = [trial for trial in search if trial.plan.neutral]
    again = [t for t in measured if t.plan.neutral and t.purpose is Purpose.CONFIRM is purpose]
    first = sorted(search, key=lambda trial: trial.ended or trial.created)
    return next(iter((*again, *as_is, *first)), None)


def versus(trial: TrialRecord, baseline: TrialRecord | None) -> str:
    """Return the change of speed from ``baseline``; a dash if one has no speed."""
    if trial.verdict is not Verdict.MEASURED or trial.measurement is None:
        return "-"
    if trial.plan.neutral:
        return "now"
    if baseline is None or baseline.measurement is None:
        return "-"
    if trial.id == baseline.id:
        return "new"
    return words.against(trial.measurement, baseline.measurement)


def verdict(trial: TrialRecord, *, best: bool = False) -> str:
    """Return how a trial ended and why; running and interrupted trials have no verdict yet."""
    again = "confirmation run: " if trial.purpose is Purpose.CONFIRM else ""
    if trial.report is None:
        return f"{again}{'running' if trial.state is State.RUNNING else 'interrupted'}"
    return again + words.verdict(trial.report, best=best)


# --- two side by side -------------------------------------------------------------------------


def comparison(one: Side, other: Side, names: tuple[str, str]) -> Table:
    """Return two trials or studies side by side; rows that differ are marked."""
    made = table(("", *names, ""))
    for title, a, b in rows(one, other):
        add(made, title, a, b, DIFFERENT if a != b else "", style="" if a != b else "dim")
    return made


def rows(one: Side, other: Side) -> Iterator[tuple[str, str, str]]:
    """Yield the title and both values of each row of a comparison."""
    a, b = _about(one), _about(other)
    yield from ((title, a[title], b[title]) for title in a)
    mine, its = (side.plan.levels if side.plan else {} for side in (one, other))
    for name in NAMES:
        levels = mine.get(name, "-"), its.get(name, "-")
        if not {*levels} <= {AS_IS, "-"}:
            yield (name, *levels)


def conclusion(one: Side, other: Side, names: tuple[str, str]) -> str:
    """Return the line that says which side is faster, and which needs less memory."""
    a, b = one.measurement, other.measurement
    if a is None or b is None:
        left = " and ".join(n for n, found in zip(names, (a, b), strict=True) if found is None)
        return f"{left}: not measured, so that there is nothing to compare"
    return (
        f"{names[1]} against {names[0]}: speed {words.against(b, a)},"
        f" peak {words.change(b.peak_device / a.peak_device)}"
    )


def _about(side: Side) -> dict[str, str]:
    """Return the rows of one side, without its plan."""
    study, trial, measured = side.study, side.trial, side.measurement
    figures = dict.fromkeys(("samples/s", "seconds a step", "peak", "samples a step"), "-")
    if measured is not None:
        figures = {
            "samples/s": words.speed(measured),
            "seconds a step": f"{measured.seconds:.4g}",
            "peak": format_size(measured.peak_device),
            "samples a step": str(measured.effective_batch),
        }
    return {
        "study": study.id,
        "trial": "-" if trial is None else str(trial.number),
        "script": str(study.script),
        "device": device(study),
        "budget": format_size(study.budget),
        "verdict": "no plan fits" if trial is None else verdict(trial),
        **figures,
    }
