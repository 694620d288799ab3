"""The model of torch's caching allocator."""

from __future__ import annotations

import pytest

from autofit.worker.harness.fake_gpu.allocator import CachingAllocator

MIB = 1 << 20
pytestmark = pytest.mark.quick


def test_sizes_are_rounded_and_segments_shared() -> None:
    allocator = CachingAllocator(limit=1 << 40)
    allocator.allocate(1)
    assert (allocator.allocated.current, allocator.reserved.current) == (512, 2 * MIB)
    allocator.allocate(3 * MIB)
    allocator.allocate(4 * MIB)
    assert allocator.reserved.current == 22 * MIB, "both are in one segment of 20 MiB"
    allocator.allocate(33 * MIB + 1)
    assert allocator.reserved.current == 22 * MIB + 34 * MIB
    assert allocator.requested.current == 40 * MIB + 2


def test_freed_blocks_are_joined_and_used_again() -> None:
    allocator = CachingAllocator(limit=1 << 40)
    first, second = allocator.allocate(8 * MIB), allocator.allocate(8 * MIB)
    last = allocator.allocate(4 * MIB)
    allocator.give_back(first)
    allocator.give_back(second)
    joined = allocator.allocate(16 * MIB - 512)
    assert allocator.reserved.current == 20 * MIB
    assert joined.size == 16 * MIB, "a rest of up to 1 MiB is not split off"
    allocator.give_back(joined)
    allocator.release()
    assert allocator.reserved.current == 20 * MIB, "a part of the segment is in use"
    allocator.give_back(last)
    allocator.release()
    assert (allocator.reserved.current, allocator.allocated.current) == (0, 0)


def test_unused_segments_are_given_back_at_the_limit() -> None:
    allocator = CachingAllocator(limit=100 * MIB)
    allocator.give_back(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert allocator.reserved.current == 80 * MIB
    assert allocator.retries == 1
    assert allocator.allocated.peak == 80 * MIB
    allocator.reset_peaks()
    assert allocator.statistics()["reserved_bytes"]["all"] == {
        "current": 80 * MIB,
        "peak": 80 * MIB,
    }
