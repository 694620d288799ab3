"""A split step needs at most 1.05 times the memory of an accumulation loop cut by hand.

Measured by ``benchmarks/split_memory.py``, one process a figure, on its small models.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests import benchmark_modules

ALLOWED = 1.05
CASES = [
    (model, accumulation, parts)
    for model in ("char_lm", "vit")
    for accumulation in (1, 2)
    for parts in (2, 4, 8)
]


@pytest.fixture(scope="module")
def benchmark(root: Path) -> ModuleType:
    return benchmark_modules.load(root, "split_memory")


@pytest.mark.full
@pytest.mark.parametrize(("model", "accumulation", "parts"), CASES)
def test_a_split_step_needs_no_more_than_a_loop(
    benchmark: ModuleType, tmp_path: Path, model: str, accumulation: int, parts: int
) -> None:
    row = benchmark.measure(benchmark.Case(model, accumulation, parts), "small", tmp_path)
    assert row.ratio <= ALLOWED
    assert row.split.loss == pytest.approx(row.loop.loss, rel=1e-4)
