"""Programs under a real cap, in processes of their own."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Capped = Callable[..., Any]

PRELUDE = """
import gc, json, sys
import torch
from torch import nn
import autofit, autofit.exceptions
from autofit.worker.meter.cpu import ShimMeter
meter = ShimMeter.loaded()
MiB = 1 << 20
def say(**values):
    print("SAID " + json.dumps(values))
def tensor(mib):
    return torch.ones(mib * MiB // 4)
"""


@pytest.fixture
def capped(tmp_path: Path) -> Capped:
    """Run a program under a cap of ``mib`` MiB and return what it says, as JSON."""

    def run(body: str, *, mib: int, **variables: str) -> Any:
        script = tmp_path / "program.py"
        script.write_text(PRELUDE + textwrap.dedent(body))
        command = [sys.executable, "-m", "autofit.worker.cap", f"{mib}MiB", "--"]
        done = subprocess.run(
            [*command, sys.executable, str(script)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
        said = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
        return json.loads(said[-1].removeprefix("SAID ")) if said else None

    return run


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store for this test alone, not made yet."""
    path = tmp_path / "fitted.db"
    monkeypatch.setenv("AUTOFIT_STORAGE", str(path))
    return path


@pytest.fixture(autouse=True)
def switches_as_they_were() -> Any:
    """Leave no switch or hook behind."""
    from autofit.resilience import switches

    yield
    switches.set_active(True)
    switches.set_hooks()
