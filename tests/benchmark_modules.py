"""Imports a program of ``benchmarks/`` as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(root: Path, name: str) -> ModuleType:
    """Return ``benchmarks/NAME.py`` as a module; ``root``: of the repository."""
    folder = root / "benchmarks"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look their names up
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(folder))
