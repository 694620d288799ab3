"""The examples in docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from tests.docs.prose import ROOT

FOLDERS = ("autofit", "storage", "strategies", "worker")
FILES = sorted(
    str(file.relative_to(ROOT))
    for folder in FOLDERS
    for file in (ROOT / folder).rglob("*.py")
    if ">>> " in file.read_text(encoding="utf-8")
)
LEFT_TO_THE_READER = {"model": len, "batch": [1, 2]}


@pytest.mark.quick
@pytest.mark.parametrize("file", FILES)
def test_the_examples_of_a_module(file: str) -> None:
    parts = Path(file).with_suffix("").parts
    module = importlib.import_module(
        ".".join(parts if parts[0] == "autofit" else ("autofit", *parts))
    )
    found = doctest.testmod(module, extraglobs=LEFT_TO_THE_READER)
    assert found.attempted
    assert not found.failed
