"""The documentation names every option, every export format and every key of a result."""

from __future__ import annotations

import json
from collections.abc import Callable

import click
import pytest

from autofit.analysis.result import Result
from autofit.cli import cli
from autofit.export import FORMATS, SUFFIXES
from tests.docs.prose import pages

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def text() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in pages())


@pytest.mark.parametrize("name", tuple(cli.lazy))
def test_every_option_is_told(name: str, text: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for param in command.params:
        if isinstance(param, click.Option):
            assert any(f"`{option}" in text for option in param.opts), f"{name}: {param.opts}"


def test_every_format_and_key_is_told(text: str, make_result: Callable[..., Result]) -> None:
    for suffix, form in SUFFIXES.items():
        assert f"| `{form}` | `{suffix}` |" in text
    for key in json.loads(FORMATS["json"](make_result())):
        assert f"`{key}`" in text
