"""A search finds the model, its blocks and its samples in every script: ``roots.md``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripts._roots import KNOWN_WRONG, row_of, scripts, written

QUICK = ("dry_run", "gan", "teacher")


def cases() -> Iterator[object]:
    for script in scripts():
        name = script.name.removesuffix(".py")
        marks = [pytest.mark.quick if name in QUICK else pytest.mark.full]
        if (wrong := KNOWN_WRONG.get(name)) is not None:
            marks.append(pytest.mark.xfail(reason=wrong.reason, strict=True))
        yield pytest.param(script, id=name, marks=marks)


@pytest.mark.parametrize("script", [*cases()])
def test_a_search_takes_the_right_module_for_the_model(script: Path, tmp_path: Path) -> None:
    assert row_of(script, tmp_path) == written()[script.name.removesuffix(".py")]


@pytest.mark.quick
def test_every_script_is_in_the_table_once() -> None:
    assert [*written()] == [script.name.removesuffix(".py") for script in scripts()]


@pytest.mark.quick
def test_the_table_holds_what_should_be_where_a_search_is_wrong() -> None:
    rows = written()
    for name, wrong in KNOWN_WRONG.items():
        assert rows[name] == wrong.right
