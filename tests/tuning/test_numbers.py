"""The table of a search, ``autofit history`` and ``Study.trials`` show the same trials."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest

from autofit.analysis import acquisition
from autofit.api.study import Study
from autofit.storage import Purpose
from autofit.tuning import local_slots
from autofit.tuning.controller import search
from autofit.tuning.notices import Confirmed, Notice, TrialDropped, TrialEnded
from autofit.tuning.options import SearchOptions
from autofit.tuning.proposals import Proposer
from autofit.view import history, words
from autofit.view.transcript import Transcript
from autofit.worker.records.trials import Script

Rows = dict[str, tuple[str, str]]
"""The plan and the speed of each trial, by its number."""


def of_the_terminal(heard: list[Notice]) -> Rows:
    """Return the last row of each trial that a terminal showed, and the confirmation runs."""
    transcript, found = Transcript(), Rows()
    for notice in heard:
        said = transcript.lines(notice)
        if isinstance(notice, TrialEnded):
            number, plan, speed, *_ = re.split(r"\s{2,}", said[-1].text.strip())
            found[number] = plan, speed
        elif isinstance(notice, Confirmed):
            found[str(notice.number)] = str(notice.plan), words.speed(notice.measurement)
            assert words.speed(notice.measurement) in said[-1].text
    return found


def of_a_notebook(html: str) -> Rows:
    """Return the rows of a study in a notebook."""
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in html.split("<tr>")]
    return {cells[0]: (unescape(cells[1]), cells[2]) for cells in rows if cells}


@pytest.mark.full
@pytest.mark.usefixtures("ray_host")
def test_each_place_shows_the_same_trials(
    script: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots; a trial is dropped in mid-search; a second search goes on with the same study."""
    monkeypatch.setattr(local_slots, "CPU_SLOTS", 2)
    monkeypatch.setattr(acquisition, "worthwhile", acquisition.prospects)
    times: Counter[bool] = Counter()

    def once(proposer: Proposer) -> bool:
        """Whether a trial runs beside a finished one; the first time."""
        finished, running, *_ = proposer.known()
        due = not times[True] and bool(finished and running)
        times[due] += 1
        return due

    monkeypatch.setattr(Proposer, "nothing_worth_running", once)
    path = script()
    options = SearchOptions(
        script=Script(target=path.name, args=("--steps", "400"), cwd=str(path.parent)),
        storage=f"sqlite:///{path.parent / 'autofit.db'}",
        trials=6,
    )
    heard: list[Notice] = []
    first = search(options, heard.append)
    assert any(isinstance(each, TrialDropped) for each in heard)
    study = Study.read(options.storage, first.study)
    assert any(trial.purpose is Purpose.CONFIRM for trial in study.trials)
    assert all(trial.report is not None for trial in study.trials), "nobody interrupted a trial"
    assert not any(trial.plan.open for trial in study.trials if trial.measurement)
    shown = {cells[0]: (cells[1], cells[2]) for cells, _ in history.trial_rows(study.found)}
    assert of_the_terminal(heard) == shown
    assert of_a_notebook(study._repr_html_()) == shown
    assert {
        str(t.number): (str(t.plan), words.speed(t.measurement) if t.measurement else "-")
        for t in study.trials
    } == shown
