"""A model of torch's caching allocator: how much memory a GPU gives out for a row of requests.

It follows ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings: the rounding of sizes,
the two pools, the sizes of segments, the choice of a free block, splitting and joining.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import count
from typing import Any

ROUND = 512
"""Every block is a multiple of these bytes (``kMinBlockSize``)."""
SMALL = 1 << 20
"""Requests up to these bytes come from the pool of small blocks (``kSmallSize``)."""
SMALL_SEGMENT = 2 << 20
MIDDLE, MIDDLE_SEGMENT = 10 << 20, 20 << 20
"""Requests below the first number get a segment of the second (``kMinLargeAlloc``)."""
LARGE_ROUND = 2 << 20
"""Segments of larger requests are multiples of these bytes (``kRoundLarge``)."""
_numbers = count()


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, given out or free."""

    size: int
    small: bool
    before: Block | None = None
    after: Block | None = None
    free: bool = True
    requested: int = 0
    number: int = field(default_factory=lambda: next(_numbers))


@dataclass(slots=True)
class Counter:
    """A number of bytes, and its peak."""

    current: int = 0
    peak: int = 0

    def add(self, change: int) -> None:
        """Add ``change``."""
        self.current += change
        self.peak = max(self.peak, self.current)


class CachingAllocator:
    """Gives out blocks, and counts what a GPU would have given out. Sizes are bytes."""

    def __init__(self, limit: int) -> None:
        """``limit``: bytes of segments above which unused ones are given back first."""
        self.allocated, self.requested, self.reserved = Counter(), Counter(), Counter()
        self.retries = 0
        self._limit = limit
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, size: int) -> Block:
        """Give out a block for ``size`` bytes. Beyond the limit it is given out all the same."""
        rounded = max(ROUND, -(-size // ROUND) * ROUND)
        small = rounded <= SMALL
        pool = self._free[small]
        at = bisect_left(pool, (rounded, -1))
        block = pool.pop(at)[2] if at < len(pool) else self._segment(rounded, small=small)
        rest = block.size - rounded
        if rest >= (ROUND if small else SMALL + 1):
            other = Block(rest, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = other
            block.size, block.after = rounded, other
            insort(pool, (rest, other.number, other))
        block.free, block.requested = False, size
        self.allocated.add(block.size)
        self.requested.add(size)
        return block

    def give_back(self, block: Block) -> None:
        """Take a block back, and join it with its free neighbours."""
        self.allocated.add(-block.size)
        self.requested.add(-block.requested)
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._remove(other)
                block.size += other.size
                if other is block.before:
                    block.before = other.before
                    if other.before is not None:
                        other.before.after = block
                else:
                    block.after = other.after
                    if other.after is not None:
                        other.after.before = block
        insort(self._free[block.small], (block.size, block.number, block))

    def release(self) -> None:
        """Give unused segments back to the device."""
        for pool in self._free.values():
            whole = [each for each in pool if each[2].before is None and each[2].after is None]
            for each in whole:
                pool.remove(each)
                self.reserved.add(-each[0])

    def reset_peaks(self) -> None:
        """Set the peaks to the present use."""
        for each in (self.allocated, self.requested, self.reserved):
            each.peak = each.current

    def statistics(self) -> dict[str, Any]:
        """Return the counters as ``torch._C._cuda_memoryStats`` does."""
        counters = {"allocated": self.allocated, "requested": self.requested}
        counters |= {"reserved": self.reserved, "active": self.allocated}
        found: dict[str, Any] = {
            f"{name}_bytes": {"all": {"current": each.current, "peak": each.peak}}
            for name, each in counters.items()
        }
        return found | {"num_alloc_retries": self.retries, "num_ooms": 0}

    def _segment(self, size: int, *, small: bool) -> Block:
        if small:
            size = SMALL_SEGMENT
        elif size < MIDDLE:
            size = MIDDLE_SEGMENT
        else:
            size = -(-size // LARGE_ROUND) * LARGE_ROUND
        if self.reserved.current + size > self._limit:
            self.retries += 1
            self.release()
        self.reserved.add(size)
        return Block(size, small)

    def _remove(self, block: Block) -> None:
        pool = self._free[block.small]
        pool.pop(bisect_left(pool, (block.size, block.number)))
