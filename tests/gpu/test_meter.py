"""The meter on a real card, held against what NVML says of the whole of it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from autofit.worker import meter

pytestmark = pytest.mark.gpu

PRELUDE = """
from autofit.worker import meter
gauge = meter.for_device("cuda")
meter.forget()
before = meter.cards()[0].held

def occupied():
    return meter.cards()[0].held - before

import torch
gauge.arm()
MIB, GIB = 1 << 20, 1 << 30
"""


def measured(body: str, cap: int | None = None) -> None:
    """Run ``body`` in a process with a meter, on a card that nobody else uses."""
    program = PRELUDE + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | meter.environment("cuda", cap),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_started_by_looking() -> None:
    measured(
        """
        assert gauge.peak() == meter.Peak(0, 0, 0) and gauge.available() is None
        gauge.sample(); gauge.reset()
        assert occupied() < 16 * MIB, occupied()
        """
    )


def test_the_context_is_measured_and_what_libraries_load_is_added() -> None:
    measured(
        """
        x = torch.ones(4096, 4096, device="cuda")
        first = gauge.context
        assert 128 * MIB < first < 2 * GIB, first
        (x @ x).sum().item()
        gauge.sample()
        assert gauge.context >= first
        assert abs(gauge.context + torch.cuda.memory_reserved() - occupied()) < 64 * MIB
        assert abs(gauge.available() - meter.hardware("cuda").total_bytes) < 2 * GIB
        """
    )


def test_the_edge_of_the_cap_is_one_of_the_device() -> None:
    measured(
        """
        held = []
        try:
            while True:
                held.append(torch.empty(16 * MIB, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            pass
        assert gauge.short()
        assert 2 * GIB - 96 * MIB < occupied() <= 2 * GIB + 16 * MIB, occupied()
        assert abs(gauge.peak().device - occupied()) < 64 * MIB
        """,
        cap=2 << 30,
    )


def test_what_is_outside_the_allocator_counts_and_leaves_less_for_tensors() -> None:
    """Managed memory, as paged optimizers have it, straight from the CUDA runtime."""
    measured(
        """
        from bitsandbytes.functional import get_paged
        torch.ones(1, device="cuda")
        gauge.reset()
        before_paged = gauge.peak().device
        paged = get_paged(256 * MIB, dtype=torch.float32, device=torch.device("cuda", 0))
        import bitsandbytes.functional as F
        F.fill(paged, 1.0)
        torch.cuda.synchronize()
        grown = gauge.peak().device - before_paged
        assert 900 * MIB < grown < 1200 * MIB, (grown, occupied())
        try:
            torch.empty(int(1.2 * GIB), dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("the cap does not know of managed memory")
        """,
        cap=(5 << 30) // 2,
    )


def test_a_cache_makes_room_for_what_comes_from_outside() -> None:
    """As libraries' kernels do in a first step whose tensors fill all that there is."""
    measured(
        """
        from bitsandbytes.functional import fill, get_paged
        cap = (5 << 30) // 2
        held = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        torch.empty(768 * MIB, dtype=torch.uint8, device="cuda")  # freed, and kept by the cache
        paged = get_paged(128 * MIB, dtype=torch.float32, device=torch.device("cuda", 0))
        fill(paged, 1.0)
        torch.cuda.synchronize()
        assert occupied() > cap, occupied()
        gauge.sample()
        assert occupied() <= cap, occupied()
        gauge.reset()
        assert gauge.peak().device <= cap, gauge.peak()
        """,
        cap=(5 << 30) // 2,
    )
