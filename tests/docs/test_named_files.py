"""Files of the repository that the documents name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

FOLDERS = "autofit|benchmarks|deploy|docs|examples|storage|strategies|tests|worker"


def test_the_files_exist(root: Path) -> None:
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    missing = [
        f"{page.relative_to(root)}: {name}"
        for page in pages
        for name in re.findall(rf"`((?:{FOLDERS})/[\w./-]+\.\w+)`", page.read_text())
        if not (root / name).exists()
    ]
    assert not missing
