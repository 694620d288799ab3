"""Turns the notices of a search into lines of text with a style; writes nothing."""

from __future__ import annotations

from typing import NamedTuple

from autofit.cli.view import table, words
from autofit.facts import Facts
from autofit.printable import printable
from autofit.tuning.notices import (
    FactsKnown,
    LevelsLeftOut,
    Line,
    Notice,
    Remeasuring,
    SizeMeasured,
    StudyStarted,
    TrialDropped,
    TrialEnded,
    TrialStarted,
)
from autofit.worker.records.trials import Verdict


class Said(NamedTuple):
    """One line, and what kind of line it is: a renderer may colour it."""

    text: str
    style: str = ""
    """``""``, ``"head"``, ``"best"``, ``"bad"`` or ``"dim"``."""


class Transcript:
    """Turns each notice into lines of at most a given width."""

    def __init__(self) -> None:
        self._opened: StudyStarted | None = None
        self._about: set[str] = set()
        self._headed = False
        self._first_seen = False
        self._now: float | None = None

    def lines(self, notice: Notice, width: int | None = None) -> list[Said]:
        """Return the lines to show for ``notice``; notices of running trials have none.

        Nothing in them acts on a terminal, whatever a script is called or has raised.
        """
        said = self._lines(notice, width)
        return [each._replace(text=printable(each.text)) for each in said]

    def _lines(self, notice: Notice, width: int | None) -> list[Said]:
        match notice:
            case StudyStarted():
                self._opened = notice
                return [Said(words.device_line(notice), "head")]
            case FactsKnown(facts=facts):
                return self._facts(facts)
            case LevelsLeftOut(reasons=reasons):
                return [Said(text, "dim") for text in words.left_out(reasons)]
            case TrialEnded():
                return self._trial(notice, table.Columns.of(width))
            case TrialDropped(plan=plan):
                return [
                    Said(
                        f"stopped early: {plan}: it is no longer expected to be the fastest", "dim"
                    )
                ]
            case Remeasuring(plan=plan):
                return [Said(f"confirming in a fresh process: {plan}", "dim")]
            case Line(text=text):
                return [Said(text, "dim")]
            case SizeMeasured() | TrialStarted():
                return []

    def _facts(self, facts: Facts) -> list[Said]:
        if self._opened is None or not facts.roots:
            return []
        about = words.script_line(self._opened.script, facts)
        if about in self._about:  # each launch finds out anew, one optimizer's step after another
            return []
        self._about.add(about)
        return [Said(about, "head")]

    def _trial(self, ended: TrialEnded, columns: table.Columns) -> list[Said]:
        assert self._opened is not None, "StudyStarted is the first notice of every search"
        budget = self._opened.budget
        above = [] if self._headed else [Said(""), Said(table.header(budget, columns), "head")]
        self._headed = True
        row = table.trial_row(
            ended.number,
            ended.report,
            budget=budget,
            versus=self._versus(ended),
            best=ended.best,
        )
        measured = ended.report.verdict is Verdict.MEASURED
        style = "best" if ended.best else "" if measured else "bad"
        return above + [Said(text, style) for text in table.lines(row, columns)]

    def _versus(self, ended: TrialEnded) -> str:
        """Return the change against the script as it is, or else the first plan that fitted."""
        measurement = ended.report.measurement
        self._first_seen |= ended.report.plan.neutral
        if ended.report.verdict is not Verdict.MEASURED or measurement is None:
            return "-"
        if ended.report.plan.neutral:
            self._now = self._now or measurement.samples_per_second
            return "now"
        if self._now is None and not self._first_seen:
            return "-"  # resumed, and the first trial was told in an earlier search
        if self._now is None:
            self._now = measurement.samples_per_second
            return "new"
        return words.change(measurement.samples_per_second / self._now)
