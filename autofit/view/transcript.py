"""Turns the notices of a search into lines of text with a style; writes nothing."""

from __future__ import annotations

from typing import NamedTuple

from autofit.facts import Facts
from autofit.text import printable
from autofit.tuning.notices import (
    Confirmed,
    FactsKnown,
    LevelsLeftOut,
    Line,
    NewOutput,
    Notice,
    PhaseBegun,
    Remeasuring,
    SizeMeasured,
    StudyStarted,
    TrialDropped,
    TrialEnded,
    TrialStarted,
)
from autofit.view import table, words
from autofit.worker.records.trials import Measurement, Verdict


class StyledLine(NamedTuple):
    """One line of text, and its style, which a renderer may show as a colour."""

    text: str
    style: str = ""
    """``""``, ``"head"``, ``"best"``, ``"bad"`` or ``"dim"``."""


class Transcript:
    """Turns each notice into lines of at most a given width.

    With ``verbose``, the lines include levels that cannot be used here, and facts that change.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose
        self._started: StudyStarted | None = None
        self._facts_shown: set[str] = set()
        self._has_header = False
        self._first_seen = False
        self._baseline: Measurement | None = None

    def lines(self, notice: Notice, width: int | None = None) -> list[StyledLine]:
        """Return the lines to show for ``notice``; notices of running trials have none.

        Control characters in the names and errors of a script are escaped.
        """
        lines = self._lines(notice, width)
        return [each._replace(text=printable(each.text)) for each in lines]

    def _lines(self, notice: Notice, width: int | None) -> list[StyledLine]:
        match notice:
            case StudyStarted():
                self._started = notice
                return [StyledLine(words.device_line(notice), "head")]
            case FactsKnown(facts=facts):
                return self._facts(facts)
            case LevelsLeftOut(reasons=reasons):
                if not self._verbose:
                    return []
                return [StyledLine(text, "dim") for text in words.left_out(reasons)]
            case TrialEnded():
                return self._trial(notice, table.Columns.of(width))
            case TrialDropped(plan=plan):
                text = f"stopped early: {plan}: it is no longer expected to be the fastest"
                return [StyledLine(text, "dim")]
            case Remeasuring(plan=plan):
                return [StyledLine(f"confirming in a new process: {plan}", "dim")]
            case Confirmed():
                return [StyledLine(self._confirmed(notice), "dim")]
            case Line(text=text):
                return [StyledLine(text, "dim")]
            case NewOutput() | PhaseBegun() | SizeMeasured() | TrialStarted():
                return []

    def _confirmed(self, found: Confirmed) -> str:
        assert self._started is not None, "StudyStarted is the first notice of every search"
        before = f" ({words.speed(found.searched)} in the search)" if found.searched else ""
        peak = words.of_budget(self._started.budget, found.measurement.peak_device)
        return (
            f"confirmed: {words.speed(found.measurement)} samples/s{before} in {peak}: {found.plan}"
        )

    def _facts(self, facts: Facts) -> list[StyledLine]:
        if self._started is None or not facts.roots:
            return []
        about = words.script_line(self._started.script, facts)
        # Each launch reports the facts again; later ones know the calls of a step.
        if about in self._facts_shown or (self._facts_shown and not self._verbose):
            return []
        self._facts_shown.add(about)
        return [StyledLine(about, "head")]

    def _trial(self, ended: TrialEnded, columns: table.Columns) -> list[StyledLine]:
        assert self._started is not None, "StudyStarted is the first notice of every search"
        budget = self._started.budget
        above = (
            []
            if self._has_header
            else [StyledLine(""), StyledLine(table.header(budget, columns), "head")]
        )
        self._has_header = True
        row = table.trial_row(
            ended.number,
            ended.report,
            budget=budget,
            versus=self._versus(ended),
            best=ended.best,
            after=ended.after,
        )
        measured = ended.report.verdict is Verdict.MEASURED
        style = "best" if ended.best else "" if measured else "bad"
        return above + [StyledLine(text, style) for text in table.lines(row, columns)]

    def _versus(self, ended: TrialEnded) -> str:
        """Return the change of speed from the script as it is, else from the first plan that fits.

        The baseline itself is shown as ``now``, or as ``new`` if the script as it is did not fit.
        """
        measurement = ended.report.measurement
        self._first_seen |= ended.report.plan.neutral
        if ended.report.verdict is not Verdict.MEASURED or measurement is None:
            return "-"
        if ended.report.plan.neutral:
            self._baseline = measurement
            return "now"
        if self._baseline is None and not self._first_seen:
            return "-"  # the study was resumed: an earlier search showed the baseline
        if self._baseline is None:
            self._baseline = measurement
            return "new"
        return words.against(measurement, self._baseline)
