"""One list of search options: the dataclass, Click's options and ``--submit`` agree."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import click
import pytest

from autofit.cli.search import command
from autofit.flags import default_of, flag_name
from autofit.strategies import Fidelity
from autofit.tuning.options import SearchOptions, command_line, flags
from autofit.worker.records.trials import Script

pytestmark = pytest.mark.quick

ONLY_IN_PYTHON = {"script", "lines"}
"""Fields that the launch line gives."""
ONLY_ON_THE_COMMAND_LINE = {
    "script",
    "module",
    "submit",
    "server",
    "shared",
    "priority",
    "deadline",
    "as_json",
    "dry_run",
    "verbose",
}
"""Parameters that say what the command does, and nothing of the search."""
GIVEN: dict[str, Any] = {
    "memory": 24 << 30,
    "allow": "recipe",
    "prefer": "memory",
    "trials": 3,
    "timeout": 5400.0,
    "only": frozenset({"precision", "optimizer"}),
    "without": frozenset({"compile"}),
    "horizon": 500,
    "sampler": "tpe",
    "headroom": 7.5,
    "gpus": 4,
    "gpus_per_trial": 2,
    "device": "cpu",
    "storage": "trials.db",
    "address": "auto",
    "fresh": True,
}


def parsed(words: list[str]) -> dict[str, Any]:
    """Return what Click makes of a command line, by the names of parameters."""
    with command.make_context("search", ["train.py", *words]) as context:
        return dict(context.params)


def test_each_field_is_an_option_and_an_argument() -> None:
    names = {each.name for each in fields(SearchOptions)}
    assert names - ONLY_IN_PYTHON == {each.name for each, _ in flags()}
    parameters = {each.name for each in command.params}
    assert parameters - ONLY_ON_THE_COMMAND_LINE == names - ONLY_IN_PYTHON


@pytest.mark.parametrize("name", [each.name for each, _ in flags()])
def test_a_field_goes_to_the_command_line_and_back(name: str) -> None:
    words = command_line({name: GIVEN[name]})
    assert words[0] == flag_name(name)
    assert parsed(words)[name] == GIVEN[name]
    everything = parsed(command_line(GIVEN))
    assert everything[name] == GIVEN[name]


def test_defaults_are_those_of_the_dataclass_and_are_not_written() -> None:
    options = SearchOptions(script=Script(target="train.py", cwd="/"), storage="trials.db")
    given = parsed([])
    assert command_line(given) == []
    assert command_line({each.name: getattr(options, each.name) for each, _ in flags()}) == [
        "--storage",
        "trials.db",
    ]
    for each, flag in flags():
        if flag.show_default:
            assert str(given[each.name]) == str(default_of(each)), each.name
    assert replace(options, allow=Fidelity[given["allow"].upper()]) == options


def test_help_names_every_fidelity() -> None:
    with click.Context(command) as context:
        told = command.get_help(context)
    assert f"[{'|'.join(map(str, Fidelity))}]" in told
    assert "[default: rounding]" in " ".join(told.split())
