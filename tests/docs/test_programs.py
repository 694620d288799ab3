"""The Python programs of these pages run: all blocks of a page, one after another."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.prose import ROOT

PAGES = (
    "docs/how-to/log-memory.md",
    "docs/how-to/search-from-python.md",
    "docs/how-to/read-the-store.md",
)
REFERENCE = "docs/reference/python.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def programs(page: str) -> list[str]:
    return _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", [*PAGES, REFERENCE])
def test_the_programs_of_a_page_run(page: str, workplace: Path) -> None:
    blocks = programs(page)[:1] if page == REFERENCE else programs(page)
    assert blocks
    program = workplace / "program.py"
    program.write_text("\n".join(blocks))
    ran = subprocess.run(
        [sys.executable, program.name], cwd=workplace, capture_output=True, text=True
    )
    assert ran.returncode == 0, f"{program.read_text()}\n{ran.stdout}{ran.stderr}"
