"""Digests of the user's own modules: evidence holds until one is edited. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from autofit.worker.harness.torch_state.frames import OURS, is_library

MOST = 2000
"""Limit of the number of files."""


def digests(folder: str) -> tuple[tuple[str, str], ...]:
    """Return the imported files below ``folder``: relative paths and SHA-256, sorted."""
    found: dict[str, str] = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not isinstance(name, str) or not name.endswith(".py"):
            continue
        path = os.path.abspath(name)
        if path.startswith(OURS) or is_library(path) or not path.startswith(folder + os.sep):
            continue
        if (digest := digest_of(path)) and len(found) < MOST:
            found[os.path.relpath(path, folder)] = digest
    return tuple(sorted(found.items()))


def digest_of(path: str | Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; empty if the file cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""
