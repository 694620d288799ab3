"""A call without gradients that does not fit runs in parts; the allocator really fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What ``short_evaluation.py`` met, case by case."""
    child = Path(__file__).with_name("short_evaluation.py")
    capped = [sys.executable, "-m", "autofit.worker.cap", "64GiB", "--", sys.executable]
    done = subprocess.run([*capped, str(child)], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


RESCUED = ["scores", "plan as is", "loss", "inference mode", "dropout in evaluation mode"]


@pytest.mark.parametrize("case", RESCUED)
def test_it_runs_in_parts(seen: dict[str, Any], case: str) -> None:
    found = seen[case]
    assert found["error"] is None
    assert found["worst"] < 1e-12
    assert len(found["met"]) >= 1
    assert {phase for phase, _ in found["met"]} == {"evaluation"}


def test_the_size_is_kept(seen: dict[str, Any]) -> None:
    assert seen["scores"]["met_again"] == len(seen["scores"]["met"])


def test_a_call_that_fits_is_left_alone(seen: dict[str, Any]) -> None:
    assert seen["room enough"] == {"error": None, "worst": 0.0, "met": [], "met_again": 0}


@pytest.mark.parametrize("case", ["batch norm in training mode", "dropout in training mode"])
def test_what_cannot_be_split_ends_as_it_would_have(seen: dict[str, Any], case: str) -> None:
    assert "can't allocate" in seen[case]["error"]
