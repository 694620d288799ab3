"""An interpreter that every uid can run, for tests of scripts under a uid of their own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import autofit

UID, OTHER = 400_990, 400_991
_VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"


def search_path() -> str:
    """Return ``PYTHONPATH`` for an interpreter outside this environment."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    packages = Path(found.origin).parents[1]
    return os.pathsep.join(map(str, (Path(autofit.__file__).parents[1], packages)))


@cache
def interpreter() -> str | None:
    """Return the interpreter; ``None`` if there is none, or if this process is not root."""
    if os.geteuid() != 0:
        return None
    for program in (sys.executable, shutil.which(_VERSION, path="/usr/local/bin:/usr/bin")):
        if program is None:
            continue
        try:
            ran = subprocess.run(
                [program, "-c", "import autofit, numpy"],
                cwd="/",
                env={"PYTHONPATH": search_path()},
                user=UID,
                group=UID,
                extra_groups=[],
                capture_output=True,
            )
        except OSError:
            continue
        if ran.returncode == 0:
            return program
    return None


@contextmanager
def open_folder() -> Iterator[Path]:
    """Yield a new folder that every uid may pass through; those of pytest are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        folder.chmod(0o711)
        yield folder
