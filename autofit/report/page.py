"""Fills the template of a report: one HTML file with its style, script and Plotly in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from autofit._version import __version__
from autofit.analysis.verdicts import best_plan
from autofit.exceptions import UsageError
from autofit.report.content import Content, read
from autofit.report.figures import figures
from autofit.storage import Store, StudyRecord, TrialRecord
from autofit.strategies import get
from autofit.text import printable
from autofit.units import format_duration, format_size
from autofit.view import history, words
from autofit.view.summary import against_baseline, commands, notes
from autofit.worker.records.trials import Verdict

NEEDS = "a report needs Plotly and Jinja: pip install 'autofit-torch[report]'"


MISSING = -1.0
"""Value of a figure that a trial does not have."""
COLUMNS = ("#", "plan", "samples/s", "vs now", "peak", "step", "verdict")
"""Titles of the table of trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of the table of trials."""

    title: str
    """One of ``COLUMNS``."""
    text: str
    value: float | None = None
    """What a column of numbers is sorted by; below zero if the trial has no such figure."""


def write_report(
    store: Store, study: StudyRecord, path: str | Path, *, storage: str | None = None
) -> None:
    """Write the report of a study to a file; it needs no other file and no network.

    ``storage``: as given by the user, for the commands that the report names. Raises ``UsageError``
    if Plotly is missing or the file cannot be written.
    """
    text = page(read(store, study), storage=storage)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{os.fspath(path)!r} cannot be written: {error.strerror}") from error


def page(content: Content, *, storage: str | None = None) -> str:
    """Return the report as HTML. Everything from the store is escaped."""
    try:
        import jinja2
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError(f"{NEEDS} ({error.name} is missing)") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autofit.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value, keep="\n") if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html")
    plotly = Markup(get_plotlyjs())  # Plotly's own script
    return template.render(plotly=plotly, **_context(content, storage))


def _context(content: Content, storage: str | None) -> Mapping[str, Any]:
    """Return what the template shows."""
    found, study, result = content.found, content.study, content.result
    return {
        "version": __version__,
        "script": str(study.script),
        "study": study.id,
        "head": history.head(found)[1:],
        "about": words.script_line(study.script, study.facts) if study.facts else "",
        "sentence": against_baseline(result) if result else "No plan fits the budget.",
        "notes": notes(result) if result else [],
        "confirmed": bool(result and result.confirmed),
        "cards": _cards(content),
        "changes": _changes(content),
        "figures": figures(content),
        "has_frontier": content.draws_frontier,
        "losses_differ": _losses_differ(content),
        "columns": COLUMNS,
        "rows": [_row(trial, content) for trial in found.trials],
        "left_out": words.left_out(study.left_out),
        "commands": commands(study.script, storage) if result else [],
        "versions": sorted(study.versions.items()),
        "day": history.day(study.opened),
        "on_cpu": study.hardware.on_host,
    }


def _cards(content: Content) -> list[tuple[str, str, str]]:
    """Return the key figures: title, figure, note."""
    result, study = content.result, content.study
    effort = (
        "search",
        format_duration(study.seconds),
        f"{words.many(content.found.searched, 'trial')} in {words.many(study.launches, 'launch')}",
    )
    if result is None:
        return [effort]
    measured, baseline = result.measurement, result.baseline
    peak = words.of_budget(result.budget, measured.peak_device)
    versus = "the script does not fit as it is"
    if baseline is not None and not result.plan.neutral:
        versus = f"{words.against(measured, baseline)} against the script as it is"
    elif baseline is not None:
        versus = "the script as it is"
    return [
        ("speed", f"{words.speed(measured)} samples/s", versus),
        ("peak memory", peak, f"{100 * measured.peak_device / result.budget:.0f} % of the budget"),
        (
            "step",
            _seconds(measured.seconds),
            f"±{100 * measured.spread:.1f} %, {words.many(measured.effective_batch, 'sample')}",
        ),
        effort,
    ]


def _changes(content: Content) -> list[tuple[str, str, str, str]]:
    """Return what the best plan changes: strategy, level, meaning, fidelity."""
    if content.result is None:
        return []
    facts = content.study.facts
    return [
        (
            strategy.name,
            strategy.describe(level),
            get(strategy.name).level(level).summary,
            str(strategy.fidelity(level, facts)),
        )
        for strategy, level in content.result.plan
    ]


def _losses_differ(content: Content) -> str:
    """Return by how much the traced losses of the best plan and the reference differ at most."""
    if len(content.losses) < 2:
        return ""
    reference, best = content.losses
    pairs = [(a, b) for a, b in zip(reference.traced, best.traced, strict=False) if a]
    shares = [abs(b - a) / abs(a) for a, b in pairs if isfinite(a) and isfinite(b)]
    return f"{100 * max(shares):.2g} %" if shares else ""


def _row(trial: TrialRecord, content: Content) -> tuple[str, list[Cell]]:
    """Return the class of a row of the table of trials, and its cells."""
    winner, baseline = content.found.winner, history.baseline(content.found, trial.purpose)
    best = winner is not None and trial.id == winner.id
    measured = trial.measurement if trial.verdict is Verdict.MEASURED else None
    out = trial.verdict is Verdict.OUT_OF_MEMORY
    kind = "best" if best else "fits" if measured else "bad" if out else "warn"
    texts, values = ["-"] * 4, [MISSING] * 4
    if measured is not None:
        rate = measured.samples_per_second
        texts = [
            words.speed(measured),
            history.versus(trial, baseline),
            format_size(measured.peak_device),
            _seconds(measured.seconds),
        ]
        before = None if baseline is None else baseline.measurement
        ratio = MISSING if before is None else rate / before.samples_per_second
        values = [rate, ratio, measured.peak_device, measured.seconds]
    text = history.verdict(trial, best=best).replace("  <- best", " (best)")
    cells = [
        (str(trial.number), float(trial.number)),
        (str(best_plan(trial)), None),
        *zip(texts, values, strict=True),
        (text, None),
    ]
    titled = zip(COLUMNS, cells, strict=True)
    return kind, [Cell(title=title, text=text, value=value) for title, (text, value) in titled]


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
