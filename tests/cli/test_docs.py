"""docs/cli.md: every command line in it parses, every option and format is in it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from autofit.analysis.result import Result
from autofit.cli import cli
from autofit.export import FORMATS, SUFFIXES

pytestmark = pytest.mark.quick
COMMANDS = tuple(cli.lazy)


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    return (root / "docs" / "cli.md").read_text()


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def test_every_command_line_parses(text: str) -> None:
    lines = re.findall(r"^autofit (?!.*SCRIPT)(.*)$", text, re.MULTILINE)
    assert {line.split()[0] for line in lines} == set(COMMANDS)
    for line in lines:
        name, *rest = shlex.split(line.split("   ")[0])
        command(name).make_context(name, rest)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_told(name: str, text: str) -> None:
    section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
    for param in command(name).params:
        if isinstance(param, click.Option) and param.name != "module":
            told = [option for option in param.opts if f"`{option}" in section]
            assert told, f"docs/cli.md, {name}: {param.opts} is missing"


def test_every_format_and_key_is_told(text: str, make_result: Callable[..., Result]) -> None:
    for suffix, form in SUFFIXES.items():
        assert f"| `{form}` | `{suffix}` |" in text
    for key in json.loads(FORMATS["json"](make_result())):
        assert f"`{key}`" in text
