"""Turns the log of allocations into a timeline of one step: which tensors existed, and when.

There are two timelines: as the script computes, and as it would under autocast. Under autocast the
tensors of matrix products have 16 bits. A float32 tensor that a product reads is copied to 16 bits
first. If only products need it in backward, only the copies are kept until then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autofit.worker.harness.measurement.allocations import (
    FULL,
    FULL_ON_CPU,
    PRODUCTS,
    PRODUCTS_BACKWARD,
    Allocation,
    AllocationLog,
    Executed,
    backward_of,
)
from autofit.worker.harness.measurement.moments import BACKWARD, FORWARD
from autofit.worker.records.inspection import Life, TensorKind, Timeline

IN_PRODUCTS = PRODUCTS | PRODUCTS_BACKWARD


def timeline(
    log: AllocationLog, first: int, *, blocks: Sequence[str], classes: int, on_host: bool
) -> Timeline | None:
    """Return the timeline of the operations from ``first`` on; ``None`` if none were measured.

    Args:
        log: The allocations, with their roles marked.
        first: Index of the first operation of the step.
        blocks: The paths of the model's repeated blocks, in the order of the forward pass.
        classes: Outputs of the model's head; 0 without a head.
        on_host: Whether autocast follows the rules of the CPU, not those of an accelerator.
    """
    executed = {index: each for index, each in log.executed.items() if index >= first}
    if not executed:
        return None
    last = max(executed)
    step = _Step(executed, first, last, classes, FULL_ON_CPU if on_host else FULL)
    inside = [
        each
        for each in log.all()
        if each.born <= last and (each.died is None or each.died >= first)
    ]
    found = [executed.get(index) for index in range(first, last + 1)]
    peaks = [0 if each is None else each.peak for each in found]
    phases = ["" if each is None else each.phase for each in found]
    return Timeline(
        lives=tuple(step.plain(each) for each in inside),
        lowered=tuple(life for each in inside for life in step.lowered(each)),
        peaks=tuple(peaks),
        forward=tuple(i for i, phase in enumerate(phases) if phase == FORWARD),
        backward=tuple(i for i, phase in enumerate(phases) if phase == BACKWARD),
        blocks=tuple(blocks),
    )


class _Step:
    """Makes the lives of one step; indices count from its first operation."""

    def __init__(
        self,
        executed: dict[int, Executed],
        first: int,
        last: int,
        classes: int,
        full: frozenset[str],
    ) -> None:
        self._executed = executed
        self._first = first
        self._last = last
        self._classes = classes
        self._in_float32 = full
        self._in_float32_backward = backward_of(full)
        forward = [index for index, each in executed.items() if each.phase == FORWARD]
        self._forward_ends = max(forward, default=first)

    def plain(self, each: Allocation) -> Life:
        """Return an allocation as a life."""
        reads = self._reads(each, BACKWARD)
        return Life(
            size=each.size,
            start=max(each.born, self._first) - self._first,
            end=(self._last if each.died is None else min(each.died, self._last)) - self._first,
            used=max([each.born, *self._reads(each, FORWARD)]) - self._first,
            wanted=(min(reads) if reads else self._last + 1) - self._first,
            kind=each.role or (TensorKind.OTHER if each.born < self._first else ""),
            block=each.block,
            of_block=each.of_block,
            returned=each.returned,
            wide=bool(self._classes) and each.width == self._classes and not each.role,
            quantized=each.role == TensorKind.OPTIMIZER_STATE and each.lowered,
        )

    def lowered(self, each: Allocation) -> Iterator[Life]:
        """Yield an allocation as lives under autocast: itself, and its copies in another type."""
        plain = self.plain(each)
        if not each.is_float or each.role == TensorKind.OPTIMIZER_STATE:
            yield plain
        elif each.role == TensorKind.GRADIENTS:
            yield plain
            if each.born >= self._first:  # its product returns 16 bits, which are cast
                at = each.born - self._first
                yield self._copy(plain, each.size // 2, at, at, at, at)
        elif each.role == TensorKind.WEIGHTS:
            yield plain
            yield from self._copies_of_weight(each, plain)
        elif each.lowered:
            yield from self._lowered(each, plain)
        elif self._phase(each.born) == BACKWARD:
            yield from self._gradient(each, plain)
        else:
            yield from self._full(each, plain)

    def _copies_of_weight(self, each: Allocation, plain: Life) -> Iterator[Life]:
        """Yield the copy of a weight: autocast keeps it until forward ends, products longer."""
        forward = self._in(each, FORWARD, IN_PRODUCTS)
        if forward:
            backward = self._in(each, BACKWARD, IN_PRODUCTS)
            start, used = forward[0] - self._first, self._forward_ends - self._first
            wanted = (min(backward) if backward else self._last + 1) - self._first
            end = max([self._forward_ends, *backward]) - self._first
            block = each.block
            yield self._copy(plain, each.size // 2, start, end, used, wanted, block=block)

    def _lowered(self, each: Allocation, plain: Life) -> Iterator[Life]:
        """Yield a tensor of 16 bits; operations in float32 make copies of it.

        Backward may use a copy by the same operation: the gradient of ``pow`` is another ``pow``.
        """
        forward = self._in(each, FORWARD, self._in_float32)
        again = {self._executed[index].name for index in forward}
        backward = self._in(each, BACKWARD, self._in_float32_backward | again)
        only_full = bool(backward) and len(backward) == len(self._reads(each, BACKWARD))
        end = plain.used if only_full and forward else plain.end
        yield self._copy(plain, each.size // 2, plain.start, end, plain.used, plain.wanted)
        for index in forward:
            until = max([index, *backward]) - self._first
            at = index - self._first
            yield self._copy(plain, each.size, at, until, at, plain.wanted)
        if not forward:
            for index in backward:
                at = index - self._first
                yield self._copy(plain, each.size, at, at, at, at)

    def _full(self, each: Allocation, plain: Life) -> Iterator[Life]:
        """Yield a tensor of float32 from before backward; each product makes a copy of it."""
        forward = self._in(each, FORWARD, IN_PRODUCTS)
        backward = self._in(each, BACKWARD, IN_PRODUCTS)
        only_products = bool(backward) and len(backward) == len(self._reads(each, BACKWARD))
        end = plain.used if only_products and forward else plain.end
        yield self._copy(plain, each.size, plain.start, end, plain.used, plain.wanted)
        # Backward runs in the opposite order. If some products have no gradient, all copies last.
        paired = len(forward) == len(backward)
        lasts = backward[::-1] if paired else [max([index, *backward]) for index in forward]
        for index, last in zip(forward, lasts, strict=True):
            at, until = index - self._first, last - self._first
            wanted = until if paired else plain.wanted
            yield self._copy(plain, each.size // 2, at, until, at, wanted)

    def _gradient(self, each: Allocation, plain: Life) -> Iterator[Life]:
        """Yield a float32 gradient of backward; products share one copy of it."""
        products = self._in(each, BACKWARD, IN_PRODUCTS)
        if not products:
            yield plain
            return
        cast, until = min(products), max(products)
        others = set(self._reads(each, BACKWARD)) - set(products)
        end = plain.end if any(index > cast for index in others) else cast - self._first
        yield self._copy(plain, each.size, plain.start, end, plain.used, plain.wanted)
        start, end = cast - self._first, until - self._first
        yield self._copy(plain, each.size // 2, start, end, start, plain.wanted)

    def _copy(
        self,
        plain: Life,
        size: int,
        start: int,
        end: int,
        used: int,
        wanted: int,
        *,
        block: int | None = None,
    ) -> Life:
        return Life(
            size=size,
            start=start,
            end=max(start, end),
            used=max(start, used),
            wanted=wanted,
            kind=plain.kind if plain.kind == TensorKind.OTHER and start == plain.start else "",
            block=self._block_at(start) if block is None or block < 0 else block,
            of_block=plain.of_block and start == plain.start,
            returned=plain.returned and start == plain.start,
            wide=plain.wide,
            quantized=False,
            of_weight=plain.kind in (TensorKind.WEIGHTS, TensorKind.GRADIENTS),
        )

    def _block_at(self, index: int) -> int:
        """Return the block whose forward runs at an index of this step."""
        found = self._executed.get(index + self._first)
        return found.block if found else -1

    def _phase(self, index: int) -> str:
        found = self._executed.get(index)
        return found.phase if found else ""

    def _reads(self, each: Allocation, phase: str) -> list[int]:
        return [index for index in each.uses if self._phase(index) == phase]

    def _in(self, each: Allocation, phase: str, names: frozenset[str]) -> list[int]:
        """Return the operations of a phase with one of these names that read an allocation."""
        return [i for i in self._reads(each, phase) if self._executed[i].name in names]
