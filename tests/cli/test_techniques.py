"""The catalogue is the strategies' own words."""

from __future__ import annotations

import json

import pytest

from autofit.cli import main
from autofit.cli.techniques import NOTHING, clashing
from autofit.space.pairs import pairs
from autofit.strategies import NAMES, REGISTRY, Memory

pytestmark = pytest.mark.quick


def test_every_level_of_every_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["techniques"]) == 0
    printed = capsys.readouterr().out
    for strategy in REGISTRY:
        assert f"{strategy.name}: {strategy.summary}\n" in printed
        assert strategy.source in printed
        for level in strategy.levels[1:]:
            assert f"{level.fidelity!s:<8}  {level.summary}\n" in printed


def test_each_stands_once_under_what_it_lowers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["techniques"]) == 0
    groups = capsys.readouterr().out.split("== lowers ")[1:]
    titles = [group.partition(" ==")[0] for group in groups]
    assert titles == [kind for kind in [*Memory, NOTHING] if kind in titles]
    for strategy in REGISTRY:
        (home,) = [group for group in groups if f"\n{strategy.name}: " in group]
        assert home.startswith((*strategy.lowers,) or NOTHING)


def test_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["techniques", "--pairs"]) == 0
    printed = capsys.readouterr().out
    matrix = printed.partition("\n\n")[0].splitlines()[1:]
    assert [line.split()[1] for line in matrix] == [*NAMES]
    found = pairs()
    for row, line in enumerate(matrix):
        for above, cell in zip(NAMES[:row], line.split()[2:], strict=True):
            both = [p for p in found if (p.one[0], p.other[0]) == (above, NAMES[row])]
            clashing = sum(pair.reason is not None for pair in both)
            assert cell == ("+" if not clashing else "-" if clashing == len(both) else "~")
    reasons = {pair.reason for pair in found if pair.reason is not None}
    assert reasons
    assert all(f"\n  {reason}\n" in printed for reason in reasons)


def test_a_line_of_clashes_names_no_pair_that_can_be_combined() -> None:
    found = pairs()
    named = set()
    for line in filter(None, clashing(found)):
        if not line.startswith(" "):
            one, _, other = line.removesuffix(":").partition(" with ")
            (first, *ones), (second, *others) = (
                each.replace(",", "").split() for each in (one, other)
            )
            named |= {((first, a), (second, b)) for a in ones for b in others}
    assert named == {(pair.one, pair.other) for pair in found if pair.reason is not None}


def test_pairs_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["techniques", "--pairs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    one = {"strategy": "checkpointing", "level": "all"}
    other = {"strategy": "compile", "level": "full"}
    (reason,) = [each["reason"] for each in found if each["pair"] == [one, other]]
    assert "one graph" in reason
    assert len(found) == len(pairs())


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["techniques", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert tuple(strategy["name"] for strategy in found) == NAMES
    assert all(strategy["levels"][0]["name"] == "as_is" for strategy in found)
