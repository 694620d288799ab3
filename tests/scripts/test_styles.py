"""Every style of training loop is the same training under a plan, or is refused for its reason.

The scripts in this folder know nothing of autofit. Each is run by plain Python and under plans that
split its batch in four, checkpoint its blocks, and do both: the same parameters after its 20 steps,
the same lines printed, or a refusal before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.scripts._runner import (
    HERE,
    NUMBER,
    TOLERANCE,
    Asked,
    Runs,
    assert_same_state,
    assert_same_text,
)
from tests.scripts._styles import ELSEWHERE, PAGE, PLANS, STYLES, Style, page


@dataclass(frozen=True)
class Comparison:
    """A style under one plan."""

    style: Style
    plan: str

    @property
    def plain(self) -> Asked:
        return Asked(script=self.style.script, ranks=self.style.ranks)

    @property
    def tuned(self) -> Asked:
        return self.plain.under(PLANS[self.plan])


def comparisons() -> Iterator[object]:
    for style in STYLES:
        for plan in PLANS:
            marks = [pytest.mark.quick if plan in style.quick else pytest.mark.full]
            if plan in style.broken:
                marks.append(pytest.mark.xfail(reason=style.broken[plan], strict=True))
            name = f"{style.script.removesuffix('.py')}-{plan}"
            yield pytest.param(Comparison(style, plan), id=name, marks=marks)


@pytest.mark.parametrize("comparison", [*comparisons()])
def test_a_tuned_run_is_the_same_training(runs: Runs, comparison: Comparison) -> None:
    style = comparison.style
    plain, tuned = runs.of(comparison.plain), runs.of(comparison.tuned)
    assert plain.code == 0, plain.errors
    if (reason := style.refusals.get(comparison.plan)) is not None:
        assert tuned.code == 0, tuned.errors  # it goes on as the script has it
        assert all(" cannot be used here: " in said for said in tuned.said)
        assert any(reason in said for said in tuned.said), tuned.said
        assert_same_text(tuned.output, plain.output, style.tolerance, style.clock)
        assert_same_state(tuned.state, plain.state, style.tolerance)
        return
    assert tuned.code == 0, tuned.errors
    if style.redraws and "micro_batch" in PLANS[comparison.plan]:
        assert NUMBER.sub("#", tuned.output) == NUMBER.sub("#", plain.output)
        return
    if not (notice := style.notices.get(comparison.plan)):
        assert tuned.said == []
    assert_same_text(tuned.output, plain.output, style.tolerance, style.clock)
    if notice:
        assert notice in tuned.errors
    elif style.stderr:
        assert_same_text(tuned.errors, plain.errors, style.tolerance, style.clock)
    assert_same_state(tuned.state, plain.state, style.tolerance)


@pytest.mark.quick
def test_every_script_has_a_row() -> None:
    named = {style.script for style in STYLES} | set(ELSEWHERE)
    ours = ("_", "test_", "conftest", "roots.")
    found = {path.name for path in HERE.iterdir() if not path.name.startswith(ours)}
    reports = {f"reports/{path.name}" for path in HERE.glob("reports/*.py")}
    assert (found - {"reports"}) | reports == named


@pytest.mark.quick
def test_the_page_shows_this_table() -> None:
    assert PAGE.read_text() == page(PAGE.read_text())


@pytest.mark.quick
def test_every_script_knows_nothing_of_autofit_and_is_short() -> None:
    for name in {style.script for style in STYLES} | set(ELSEWHERE) - {"counted.py"}:
        path = HERE / name
        for file in [path] if path.is_file() else path.glob("*.py"):
            text = file.read_text()
            assert "autofit" not in text, name
            assert len(text.splitlines()) <= 100, name


@pytest.mark.quick
def test_another_tolerance_has_its_reason() -> None:
    assert all(style.why for style in STYLES if style.tolerance != TOLERANCE)
