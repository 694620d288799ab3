"""docs/reference/formats.md names every format, and every key of the JSON documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.analysis.result import Result
from autofit.cli import main
from autofit.export import FORMATS, SUFFIXES, render
from autofit.plan import Plan
from autofit.worker.records.phases import ORDER

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def formats(root: Path) -> str:
    """The page on the formats of plans and results."""
    return (root / "docs/reference/formats.md").read_text()


def test_every_format_and_its_suffix_is_there(formats: str) -> None:
    suffixes = {form: suffix for suffix, form in SUFFIXES.items()}
    for form in FORMATS:
        suffix = f"`{suffixes[form]}`" if form in suffixes else ""
        assert f"| `{form}` | {suffix}".rstrip() in formats


def test_every_key_of_a_result_is_there(formats: str, make_result: Callable[..., Result]) -> None:
    document = json.loads(render("json", make_result(Plan())))
    keys = {*document, *document["baseline"], *document["script"], *document["hardware"]}
    assert not [key for key in sorted(keys) if f"| `{key}` |" not in formats]


def test_every_phase_is_there(formats: str) -> None:
    assert not [phase for phase in ORDER if f"| `{phase}` |" not in formats]


def test_every_key_of_the_catalogue_is_there(
    formats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["techniques", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert not [key for key in (*first, *first["levels"][0]) if f"`{key}`" not in formats]
