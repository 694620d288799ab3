"""Where Ray's programs are, and whether its job server is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

TOOLS = Path(sys.executable).parent
"""Where ``ray``, ``autofit`` and ``python`` are."""


def needs_a_job_server() -> None:
    """Skip the test, with a reason, where Ray has none."""
    for package in ("aiohttp_cors", "opencensus"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"Ray's job server needs {package}: pip install -e '.[dev]'")
