"""The table of trials: makes rows of text, then lines of a given width."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

from autofit.view import words
from autofit.worker.records.trials import TrialReport, Verdict

PLAN = 50
"""Width of the plan's column without a terminal; few plans are longer."""
BAR = 14
"""Characters of the bar for a peak that equals the budget."""
_BAR_FROM = 100
"""Terminals narrower than this show no bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trial as text."""

    number: str
    plan: str
    rate: str = "-"
    versus: str = "-"
    peak: str = "-"
    bar: str = ""
    verdict: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The widths of the columns for plan and verdict; ``None`` does not limit them."""

    plan: int | None = None
    verdict: int | None = None
    bar: bool = True

    @classmethod
    def of(cls, width: int | None) -> Columns:
        """Return the columns that fill ``width`` characters; ``None`` means no limit."""
        if width is None:
            return cls()
        bar = width >= _BAR_FROM
        free = width - (56 if bar else 44)
        plan = max(8, free * 11 // 20)
        return cls(plan=plan, verdict=max(8, free - plan), bar=bar)


def trial_row(
    number: int, report: TrialReport, *, budget: int, versus: str, best: bool, after: str = ""
) -> Row:
    """Return the row of a finished trial; ``after``: what has measured or refused it anew."""
    measured = report.measurement if report.verdict is Verdict.MEASURED else None
    out = report.verdict is Verdict.OUT_OF_MEMORY
    over = f"> {words.in_unit_of(budget, budget)}" if out else "-"
    return Row(
        number=str(number),
        plan=str(report.best or report.plan),
        rate=words.speed(measured) if measured else "-",
        versus=versus,
        peak=words.in_unit_of(budget, measured.peak_device) if measured else over,
        bar=bar_of(measured.peak_device, budget) if measured else "#" * BAR + ">" if out else "",
        verdict=words.verdict(report, best=best) + (f", after {after}" if after else ""),
    )


def bar_of(peak: int, budget: int) -> str:
    """Return the bar for a peak: full at the budget, never longer."""
    return "#" * min(BAR, max(1, round(BAR * peak / budget)))


def header(budget: int, columns: Columns) -> str:
    """Return the line above the rows."""
    top = f"{words.in_unit_of(budget, budget)} {words.unit_of(budget)[0]}"
    titles = Row(
        number="#", plan="plan", rate="samples/s", versus="vs now", peak="", verdict="verdict"
    )
    return _line(titles, columns, peak=f"peak of {top}" if columns.bar else f"of {top}")


def lines(row: Row, columns: Columns) -> list[str]:
    """Return the lines of a row: more than one if its plan or verdict is wrapped."""
    plans, verdicts = _wrapped(row.plan, columns.plan), _wrapped(row.verdict, columns.verdict)
    first = _line(row, columns, plan=plans[0], verdict=verdicts[0])
    rest = []
    for index in range(1, max(len(plans), len(verdicts))):
        blank = Row(
            number="",
            plan=plans[index] if index < len(plans) else "",
            rate="",
            versus="",
            peak="",
            verdict=verdicts[index] if index < len(verdicts) else "",
        )
        rest.append(_line(blank, columns))
    return [first, *rest]


def _wrapped(text: str, width: int | None) -> list[str]:
    return [text] if width is None else wrap(text, width) or [""]


def _line(
    row: Row,
    columns: Columns,
    *,
    plan: str | None = None,
    verdict: str | None = None,
    peak: str | None = None,
) -> str:
    peaks = f"{row.peak:>7} {row.bar:<{BAR + 1}}" if columns.bar else f"{row.peak:>11}"
    cells = (
        f"{row.number:>3}",
        f"{row.plan if plan is None else plan:<{columns.plan or PLAN}}",
        f"{row.rate:>13}",
        f"{row.versus:>7}",
        f"{peaks if peak is None else peak:<{BAR + 9 if columns.bar else 11}}",
        row.verdict if verdict is None else verdict,
    )
    return "  ".join(cells).rstrip()
