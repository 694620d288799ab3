"""``autofit check``: fits or not, and what grew since the last check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autofit.cli import main
from autofit.inspection.check import _grown
from autofit.view.explanation import check_line
from tests.inspection import by_hand
from tests.inspection.conftest import WIDTH

GIB = by_hand.GIB


@pytest.mark.quick
def test_a_layer_made_twice_as_wide_is_named(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "train.py", "--memory", "1GiB"]) == 0
    assert capsys.readouterr().out.endswith("; first check\n")
    widths = [WIDTH, 2 * WIDTH, WIDTH, WIDTH]
    train.write_text(train.read_text().replace(str([WIDTH] * 4), str(widths)))
    assert main(["check", "train.py", "--memory", "1GiB", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    grown = {each["module"]: each for each in document["grown"]}
    largest = [each["module"] for each in document["grown"][:2]]
    assert sorted(largest) == ["1.down", "1.up"], document["grown"]
    assert grown["1.up"]["after_bytes"] - grown["1.up"]["before_bytes"] >= 12 * 32 * WIDTH
    assert document["fits"]
    assert document["peak_bytes"] > document["last_peak_bytes"]


@pytest.mark.quick
def test_a_script_that_does_not_fit(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.write_text(train.read_text().replace("randn(64, 32)", "randn(65536, 32)"))
    assert main(["check", "train.py", "--memory", "40MiB"]) == 3
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("train.py does not fit 40.0 MiB: out of memory in ")


@pytest.mark.quick
def test_a_script_that_fails(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.write_text("raise KeyError('labels')\n")
    assert main(["check", "train.py", "--memory", "1GiB"]) == 1
    assert "KeyError: 'labels'" in capsys.readouterr().err
    assert not Path("autofit.db").exists()


@pytest.mark.quick
def test_the_line() -> None:
    fits = check_line(by_hand.check(peak=9 * GIB))
    assert " fits: 9.0 GiB of 24.0 GiB; +1.0 GiB since the check of " in fits
    assert fits.endswith(": h.1.up +1.0 GiB")
    assert " does not fit: 25.0 GiB of 24.0 GiB; +17.0 GiB" in check_line(
        by_hand.check(peak=25 * GIB)
    )
    short = check_line(by_hand.check(peak=None))
    assert "does not fit 24.0 GiB: out of memory in forward (2.0 GiB requested) at " in short


@pytest.mark.quick
def test_what_is_missing_when_memory_ran_out_has_not_shrunk() -> None:
    before = {"up": {"weights": 4, "activations": 9}, "down": {"weights": 4}, "": {"workspace": 1}}
    after = {"up": {"weights": 8, "activations": 99}, "": {"workspace": 5}}
    (grown,) = _grown(before, after, whole=False)
    assert (grown.module, grown.growth, grown.kinds) == ("up", 4, ("weights",))
    whole = _grown(before, after, whole=True)
    assert [each.growth for each in whole] == [94, 4, -4]


@pytest.mark.quick
def test_the_budget_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "train.py"]) == 2
    assert "Missing option '--memory'" in capsys.readouterr().err
