"""Each technique has figures of its worth, and the page shows those that there are."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

from autofit.strategies import NAMES, get
from tests.benchmark_modules import load

pytestmark = pytest.mark.quick

NOT_YET = {"ranks", "sharding"}
"""Techniques without figures of their own so far: the works measured leave them nothing to do, or
the device's time was up. Take a name out as its figures come."""


CLOSE = 1.15
"""Factor within which a prior is of the median that was measured."""


@pytest.fixture(scope="module")
def benchmark(root: Path) -> ModuleType:
    return load(root, "strategies")


def test_each_technique_has_figures(root: Path) -> None:
    document = json.loads((root / "benchmarks" / "results" / "strategies.json").read_text())
    measured = {row["strategy"] for row in document["rows"] if row["samples_per_second"]}
    assert {*NAMES} - measured == NOT_YET


def test_the_page_shows_what_was_measured(root: Path, benchmark: ModuleType) -> None:
    document = json.loads((root / "benchmarks" / "results" / "strategies.json").read_text())
    assert (root / "benchmarks/results/strategies.md").read_text() == benchmark.page(document)


def test_what_a_search_expects_is_near_what_was_measured(root: Path) -> None:
    """The step time of a level beside its company, on every work that it was measured on."""
    document = json.loads((root / "benchmarks" / "results" / "strategies.json").read_text())
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in document["rows"]:
        if row["ratio"] and row["strategy"] != "micro_batch":  # whose sizes have no prior
            found[row["strategy"], row["level"]].append(row["ratio"])
    priors = {key: get(key[0]).level(key[1]).slowdown for key in found}
    off = {key: priors[key] / statistics.median(ratios) for key, ratios in found.items()}
    assert not {key: ratio for key, ratio in off.items() if not 1 / CLOSE < ratio < CLOSE}
