"""The drawings on the page on the architecture: their files exist, their layers are enforced."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick
MOST = 25
"""Files that a plan may pass on its way down and back."""


@pytest.fixture(scope="module")
def drawings(root: Path) -> list[str]:
    """The layers, the way down, the way back."""
    page = (root / "docs/explanation/architecture.md").read_text()
    found = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(found) == 3
    return found


def files(drawing: str) -> list[str]:
    return re.findall(r"(?:autofit|worker|strategies|storage)/[\w/]+\.py", drawing)


def test_the_files_exist(root: Path, drawings: list[str]) -> None:
    named = [file for drawing in drawings for file in files(drawing)]
    assert not [file for file in named if not (root / file).is_file()]
    assert 0 < len(set(named)) <= MOST


def test_no_package_is_entered_twice_on_the_way_down(drawings: list[str]) -> None:
    packages = [str(Path(file).parent) for file in files(drawings[1])]
    entered = [p for p, before in zip(packages, ["", *packages], strict=False) if p != before]
    assert len(entered) == len(set(entered)), entered


def test_the_layers_are_those_that_import_linter_enforces(root: Path, drawings: list[str]) -> None:
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [c["layers"] for c in settings["contracts"] if c["type"] == "layers"]
    names = {
        name.strip().removeprefix("autofit.")
        for layer in (line for lines in layers for line in lines)
        for name in re.split(r"[|:]", layer)
    }
    drawn = set(re.findall(r"[\w.]+", drawings[0]))
    assert not names - drawn
