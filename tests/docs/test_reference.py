"""The generated pages of the reference are what the code says today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.quick
def test_the_generated_pages_are_up_to_date(root: Path) -> None:
    command = [sys.executable, str(root / ".ci/reference.py"), "--check"]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
