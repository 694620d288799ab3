"""A part of the zoo: nothing wrong is accepted, and no deliberate fault passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
def test_nothing_wrong_is_accepted(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "verdicts.py"), "--quick"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "falsely refused." not in done.stdout
