"""One list of search options: the dataclass and Click's options agree."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import click
import pytest

from autofit.cli.search import command
from autofit.flags import default_of
from autofit.strategies import Fidelity
from autofit.tuning.options import SearchOptions, flags
from autofit.worker.records.trials import Script

pytestmark = pytest.mark.quick

ONLY_IN_PYTHON = {"script", "lines"}
"""Fields that the launch line gives."""
ONLY_ON_THE_COMMAND_LINE = {
    "script",
    "module",
    "server",
    "shared",
    "priority",
    "deadline",
    "as_json",
    "dry_run",
    "verbose",
}
"""Parameters that say what the command does, and nothing of the search."""


def parsed(words: list[str]) -> dict[str, Any]:
    """Return what Click makes of a command line, by the names of parameters."""
    with command.make_context("search", ["train.py", *words]) as context:
        return dict(context.params)


def test_each_field_is_an_option_and_an_argument() -> None:
    names = {each.name for each in fields(SearchOptions)}
    assert names - ONLY_IN_PYTHON == {each.name for each, _ in flags()}
    parameters = {each.name for each in command.params}
    assert parameters - ONLY_ON_THE_COMMAND_LINE == names - ONLY_IN_PYTHON


def test_defaults_are_those_of_the_dataclass() -> None:
    options = SearchOptions(script=Script(target="train.py", cwd="/"), storage="trials.db")
    given = parsed([])
    for each, flag in flags():
        if flag.show_default:
            assert str(given[each.name]) == str(default_of(each)), each.name
    assert replace(options, allow=Fidelity[given["allow"].upper()]) == options


def test_help_names_every_fidelity() -> None:
    with click.Context(command) as context:
        told = command.get_help(context)
    assert f"[{'|'.join(map(str, Fidelity))}]" in told
    assert "[default: rounding]" in " ".join(told.split())
