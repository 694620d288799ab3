"""What importing costs and touches: nothing heavy, nothing global, in fresh processes."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import autofit
from autofit.strategies import REGISTRY

pytestmark = pytest.mark.quick

HEAVY = {"torch", "ray", "optuna", "sqlalchemy", "transformers"}
AUTOFIT = Path(sys.executable).with_name("autofit")
"""The installed command."""

HELP = """
import sys

from autofit.cli import main

sys.argv = ["autofit", "--help"]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""

GLOBAL_STATE = """
import logging, os, signal, sys

def state():
    root = logging.getLogger()
    return {
        "environment": dict(os.environ),
        "path": list(sys.path),
        "hooks": [repr(hook) for hook in (sys.excepthook, sys.unraisablehook, sys.displayhook)],
        "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "logging": [root.level, root.handlers[:], logging.root.manager.disable],
        "loggers": [
            name
            for name, logger in root.manager.loggerDict.items()
            if getattr(logger, "handlers", None) or getattr(logger, "level", 0)
        ],
    }

before = state()
import autofit
after = state()
changed = [key for key in before if before[key] != after[key]]
assert not changed, changed
"""


def _run(code: str) -> str:
    """Run ``code`` in a fresh interpreter and return what it prints."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def _loaded(code: str) -> set[str]:
    """Return the top-level modules a fresh interpreter holds after ``code``."""
    printed = _run(f"{code}\nimport json, sys; print(json.dumps(list(sys.modules)))")
    return {name.partition(".")[0] for name in json.loads(printed.splitlines()[-1])}


def test_importing_autofit_loads_nothing_heavy() -> None:
    assert not _loaded("import autofit") & HEAVY


def test_importing_autofit_changes_nothing_global() -> None:
    _run(GLOBAL_STATE)


def test_the_metadata_of_the_strategies_loads_no_torch() -> None:
    homes = {type(strategy).__module__ for strategy in REGISTRY}
    assert len(homes) == len(REGISTRY)
    assert not _loaded(f"import {', '.join(homes)}") & HEAVY


def test_help_loads_nothing_heavy() -> None:
    assert not _loaded(HELP) & (HEAVY | {"rich"})


def test_help_is_quick() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([AUTOFIT, "--help"], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.3


def test_each_public_name_can_be_imported() -> None:
    assert set(autofit.__all__) == {
        "Plan",
        "Study",
        "search",
        "best",
        "explain",
        "fit",
        "resilient",
        "run",
        "__version__",
    }
    _run("import autofit; [getattr(autofit, name) for name in autofit.__all__]")
