"""Checks for what ``torch.compile`` needs to make code for a GPU. Imports no torch."""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata, util

OLDEST = (2, 6)
"""The first torch with ``fail_on_recompile_limit_hit``, which reports too many recompilations."""
COMPILERS = ("cc", "gcc", "clang")


def cannot_compile() -> str | None:
    """Return why ``torch.compile`` cannot work for a GPU; ``None`` if nothing is missing."""
    if sys.platform == "win32":
        return "Triton has no release for Windows"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        return f"it needs torch {OLDEST[0]}.{OLDEST[1]}, here is {version}"
    if util.find_spec("triton") is None:
        return "Triton is not installed"
    if not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", *COMPILERS)):
        return "Triton needs a C compiler, and there is none on the PATH"
    return None
