"""What a search returns: its best plan, its trials, its frontier and its report."""

from __future__ import annotations

import html
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from autofit.analysis.frontier import Point, frontier
from autofit.analysis.result import Result
from autofit.analysis.studies import StoredStudy, stored_study
from autofit.analysis.verdicts import best_plan
from autofit.report.page import write_report
from autofit.storage import Store, StudyRecord, TrialRecord
from autofit.text import printable
from autofit.view import history

WIDTH = 120
"""Characters of a line in the text of a study."""
_STYLE = "text-align: left; padding: 2px 12px 2px 0"
_NARROW = """<style>
.autofit-study { container-type: inline-size; }
@container (max-width: 560px) {
  .autofit-study thead { display: none; }
  .autofit-study table, .autofit-study tbody, .autofit-study tr { display: block; }
  .autofit-study tr { padding: 4px 0; }
  .autofit-study td { display: grid; grid-template-columns: 6rem 1fr; overflow-wrap: anywhere; }
  .autofit-study td::before { content: attr(data-title); font-weight: normal; }
}
</style>"""
"""In a narrow column each trial is a block with a line for each cell."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Study:
    """A stored study at the moment when it was read.

    It shows itself as a table of its trials: as text, and as HTML in a notebook. ``frontier`` holds
    the plans that trade speed for memory, the fastest first.
    """

    storage: str
    """SQLAlchemy URL of the store."""
    found: StoredStudy
    """The study's record, its trials and its best result."""
    frontier: tuple[Point, ...]
    """The plans that trade speed for memory, the fastest first."""

    @classmethod
    def read(cls, storage: str, identifier: str) -> Study:
        """Return the study with this identifier from the store at a URL."""
        with Store(storage, create=False) as store:
            study = store.study(identifier)
            return cls(
                storage=storage, found=stored_study(store, study), frontier=frontier(store, study)
            )

    @property
    def id(self) -> str:
        """The identifier, as ``autofit history`` lists it."""
        return self.found.study.id

    @property
    def record(self) -> StudyRecord:
        """The script, the device, the budget and the facts of the study."""
        return self.found.study

    @property
    def best(self) -> Result | None:
        """The best result; ``None`` if no plan fits."""
        return self.found.result

    @property
    def trials(self) -> tuple[TrialRecord, ...]:
        """All trials by number, confirmation runs included, each with the plan that ran.

        Numbers that a trial has to find, such as the micro-batch size, are those of its best
        measurement.
        """
        return tuple(replace(trial, plan=best_plan(trial)) for trial in self.found.trials)

    def report(self, path: str | os.PathLike[str] = "autofit-report.html") -> Path:
        """Write the study as one HTML file and return its path, as ``autofit report`` does.

        Raises ``UsageError`` if Plotly is missing (``autofit-torch[report]``), or if the file
        cannot be written.
        """
        with Store(self.storage, create=False) as store:
            write_report(store, store.study(self.id), Path(path))
        return Path(path)

    def __repr__(self) -> str:
        text = io.StringIO()
        console = Console(file=text, width=WIDTH, color_system=None, force_jupyter=False)
        console.print(history.trials(self.found))
        lines = [*history.head(self.found), "", *text.getvalue().splitlines()]
        return "\n".join(printable(line).rstrip() for line in lines)

    def _repr_html_(self) -> str:
        """Return the trials as a table for a notebook; all text is escaped."""
        return "".join(self._html())

    def _html(self) -> Iterator[str]:
        yield f'{_NARROW}<div class="autofit-study">'
        for line in history.head(self.found):
            yield f"<div>{_escaped(line)}</div>"
        yield "<table><thead><tr>"
        yield from (f'<th style="{_STYLE}">{_escaped(title)}</th>' for title in history.TRIALS)
        yield "</tr></thead><tbody>"
        for cells, best in history.trial_rows(self.found):
            style = f"{_STYLE}; font-weight: bold" if best else _STYLE
            yield "<tr>"
            for title, cell in zip(history.TRIALS, cells, strict=True):
                yield f'<td style="{style}" data-title="{_escaped(title)}">{_escaped(cell)}</td>'
            yield "</tr>"
        yield "</tbody></table></div>"


def _escaped(text: str) -> str:
    return html.escape(printable(text))
