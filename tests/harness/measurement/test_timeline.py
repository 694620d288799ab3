"""The timeline of a step under bf16 autocast, by the rules of CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from autofit.worker.harness.measurement.allocations import (
    Allocation,
    AllocationLog,
    Executed,
    Lines,
)
from autofit.worker.harness.measurement.timeline import timeline

pytestmark = pytest.mark.quick

MIB = 1 << 20
NAMES = ("addmm", "pow", "tanh", "tanh_backward", "pow", "mul", "mm")
"""The operations of a step; the first three are forward."""


def test_a_copy_for_pow_exists_until_its_gradient_is_computed() -> None:
    """Each layer of GPT-2 raises what its first product returns to the third power."""
    executed = {
        index: Executed(name, "forward" if index < 3 else "backward", 0, -1)
        for index, name in enumerate(NAMES)
    }
    product = Allocation(
        size=2 * MIB,
        born=0,
        step=0,
        phase="forward",
        operation="addmm",
        lines=Lines(),
        module="",
        width=8,
        is_float=True,
        lowered=True,
        uses=[1, 4],
        died=5,
    )
    log = cast(AllocationLog, SimpleNamespace(executed=executed, all=lambda: [product]))
    found = timeline(log, 0, blocks=(), classes=0, on_host=False)
    assert found is not None
    assert [(life.size, life.start, life.end) for life in found.lives] == [(2 * MIB, 0, 5)]
    lowered = {(life.size, life.start, life.end) for life in found.lowered}
    assert lowered == {(MIB, 0, 1), (2 * MIB, 1, 4)}
