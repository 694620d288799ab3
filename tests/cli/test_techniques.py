"""The catalogue is the strategies' own words."""

from __future__ import annotations

import json

import pytest

from autofit.cli import main
from autofit.cli.search import FIDELITIES
from autofit.strategies import NAMES, REGISTRY, Fidelity

pytestmark = pytest.mark.quick


def test_every_level_of_every_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["techniques"]) == 0
    printed = capsys.readouterr().out
    for strategy in REGISTRY:
        assert f"{strategy.name}: {strategy.summary}\n" in printed
        assert strategy.source in printed
        for level in strategy.levels:
            assert f"{level.fidelity!s:<8}  {level.summary}\n" in printed


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["techniques", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert tuple(strategy["name"] for strategy in found) == NAMES
    assert all(strategy["levels"][0]["name"] == "as_is" for strategy in found)


def test_the_names_in_help_are_those_there_are() -> None:
    assert tuple(str(each) for each in Fidelity) == FIDELITIES
