"""A split step needs at most 1.05 times the memory of an accumulation loop cut by hand.

Measured by ``benchmarks/split_memory.py``, one process a figure, on its small models.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ALLOWED = 1.05
CASES = [
    (model, accumulation, parts)
    for model in ("char_lm", "vit")
    for accumulation in (1, 2)
    for parts in (2, 4, 8)
]


@pytest.fixture(scope="module")
def benchmark(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "split_memory", root / "benchmarks" / "split_memory.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their names up
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
@pytest.mark.parametrize(("model", "accumulation", "parts"), CASES)
def test_a_split_step_needs_no_more_than_a_loop(
    benchmark: ModuleType, tmp_path: Path, model: str, accumulation: int, parts: int
) -> None:
    row = benchmark.measure(benchmark.Case(model, accumulation, parts), "small", tmp_path)
    assert row.ratio <= ALLOWED
    assert row.split.loss == pytest.approx(row.loop.loss, rel=1e-4)
