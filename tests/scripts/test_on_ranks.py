"""Each script over several ranks is the same training, or becomes what the table says."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from tests.scripts._on_ranks import LEVELS, PAGE, REFUSED, SAME, SCRIPTS, outcome
from tests.scripts._runner import TOLERANCE, Asked, Runs, assert_same_state

ROW = re.compile(r"^\| `(?P<script>[\w.]+)` \| (?P<cells>.*) \|$", re.MULTILINE)
CELL = re.compile(r"(?P<word>[^(]+?)(?: \((?P<number>\d+)\))?")
NOTE = re.compile(r"^(?P<number>\d+)\. (?P<reason>.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Comparison:
    """A script, plainly and under one plan."""

    script: str
    column: str

    @property
    def plain(self) -> Asked:
        return Asked(script=self.script)

    @property
    def tuned(self) -> Asked:
        return self.plain.under(LEVELS[self.column])


def expected() -> dict[str, dict[str, tuple[str, str]]]:
    """Return the outcomes that the table shows."""
    text = PAGE.read_text()
    reasons = {note["number"]: note["reason"] for note in NOTE.finditer(text)}
    found = {}
    for row in ROW.finditer(text):
        cells = map(CELL.fullmatch, row["cells"].split(" | "))
        found[row["script"]] = {
            column: (cell["word"], reasons.get(cell["number"], ""))
            for column, cell in zip(LEVELS, filter(None, cells), strict=True)
        }
    return found


@pytest.mark.quick
def test_each_script_has_a_row_and_none_differs() -> None:
    rows = expected()
    assert rows.keys() == SCRIPTS.keys()
    words = {word for row in rows.values() for word, _ in row.values()}
    assert words <= {SAME, "refused", "not divided"}


@pytest.mark.quick
def test_a_reason_is_found_in_what_autofit_says() -> None:
    said = "autofit: 2 ranks cannot be used here: the data differs; continuing under as it is\n"
    assert REFUSED.search(said)["reason"] == "the data differs"  # type: ignore[index]


@pytest.mark.full
@pytest.mark.parametrize(
    "comparison",
    [
        pytest.param(Comparison(script, column), id=f"{script.removesuffix('.py')}-{column}")
        for script in SCRIPTS
        for column in LEVELS
    ],
)
def test_a_script_becomes_what_the_table_says(runs: Runs, comparison: Comparison) -> None:
    plain, ranked = runs.of(comparison.plain), runs.of(comparison.tuned)
    found = outcome(SCRIPTS[comparison.script], plain, ranked)
    assert found == expected()[comparison.script][comparison.column]


@pytest.mark.quick
def test_a_batch_of_which_a_part_fails_runs_whole_on_every_rank(runs: Runs) -> None:
    """From step 8 on, a slice lacks pictures that its samples refer to."""
    plain = Asked(script="reports/vlm_pictures.py")
    whole, ranked = runs.of(plain), runs.of(plain.under({"ranks": "2"}))
    assert ranked.code == 0, ranked.errors
    assert_same_state(ranked.state, whole.state, TOLERANCE)
    line = "every rank runs the whole batch: the model raises RuntimeError for a part of it"
    assert line in ranked.errors
