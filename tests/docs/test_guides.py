"""The page on the guides is made from what was measured, and its commands can run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from autofit.plan import Plan
from autofit.space.catalogue import clash
from tests.benchmark_modules import load
from tests.docs.prose import complaints


@pytest.fixture(scope="module")
def guides(root: Path) -> ModuleType:
    return load(root, "guides")


@pytest.mark.quick
def test_the_page_shows_what_was_measured(root: Path, guides: ModuleType) -> None:
    rows = guides.stored(root / "benchmarks/results/guides.json", "rows")
    page = (root / "docs/tutorials/guides.md").read_text()
    assert page == guides.page(rows), "run `python benchmarks/guides.py --page`"
    for row in rows:
        assert row["command"] == guides.COMMANDS[row["name"]].line, f"measure {row['name']} again"


@pytest.mark.quick
def test_a_figure_reaches_the_page(guides: ModuleType, tmp_path: Path) -> None:
    rows = [row(name, guides.COMMANDS[name]) for name in guides.COMMANDS]
    page = tmp_path / "guides.md"
    page.write_text(guides.page(rows))
    assert not complaints(page)
    for each in rows:
        line = next(line for line in page.read_text().splitlines() if f"| `{each['name']}`" in line)
        failed = each["code"] != 0
        figure = "exit code 3" if failed else "12.34"
        assert [figure in line, "5.0 GiB" in line, "2.5 to 1.5" in line] == [True] * 3
        assert f"log of {each['name']}" in page.read_text()


def row(name: str, command: Any) -> dict[str, Any]:
    return {
        "name": name,
        "command": command.line,
        "hardware": "a card",
        "versions": {},
        "code": 3 if name == "sgd" else 0,
        "seconds": 60.0,
        "plan": command.plan,
        "samples_per_second": 12.34,
        "peak_allocated": 5 << 30,
        "peak_device": 6 << 30,
        "losses": [2.5, 1.5],
        "log": [f"log of {name}"],
    }


@pytest.mark.quick
def test_the_plans_are_plans(guides: ModuleType) -> None:
    for command in guides.COMMANDS.values():
        plan = Plan.of(json.loads(command.document)["plan"])
        assert clash(plan) is None
        assert not plan.open
        assert bool(command.plan) == ("--plan plan.json" in command.line)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_commands_run_on_small_models(root: Path, tmp_path: Path) -> None:
    asked = ["--small", "--only", "sgd", "--only", "bert-as", "--only", "bigbird"]
    ran = subprocess.run(
        [sys.executable, str(root / "benchmarks/guides.py"), *asked, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    rows = json.loads((tmp_path / "guides.json").read_text())["rows"]
    assert [each["name"] for each in rows] == ["bert-as-it-is", "bigbird-search", "sgd"]
    for each in rows:
        assert each["code"] == 0, each
        assert each["samples_per_second"] > 0
        assert any("samples/s" in line for line in each["log"])
    assert rows[2]["plan"] == {"optimizer": "sgd"}
    first, last = rows[2]["losses"]
    assert 0 < last < 1.05 * first, "24 steps of a tiny model hardly lower its loss"
    assert rows[1]["peak_device"] > 0
