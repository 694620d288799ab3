"""Predicts the peak of a plan: replays the tensors of one step as they would exist under the plan.

An inspection has followed every tensor from the operation that made it to the one after which it
was freed. A plan changes sizes and lifetimes: checkpointing frees the activations of a block after
its forward and makes them again in backward, a split batch shrinks all of them. The peak of the
changed timeline is the prediction. It may be at another moment than the script's own peak.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from autofit import strategies
from autofit.facts import Facts
from autofit.plan import Plan
from autofit.space.order import expected
from autofit.space.static_memory import CONTEXT, remaining_share, total_bytes
from autofit.strategies import AS_IS, Memory
from autofit.strategies.checkpointing import ALL, count
from autofit.strategies.loss.chunks import tokens_in_chunk
from autofit.strategies.precision import AUTOCAST
from autofit.worker.records.inspection import Kind, Timeline

SCALAR = 8
"""Bytes of a number, such as a loss that the model returns."""
FLOAT = 4
"""Bytes of a float32 number."""
CHUNKS_OF_LOGITS = 3
"""Tensors as large as a chunk of logits that exist at once in the chunked loss."""
OFFLOADED = 1 << 20
"""Smallest tensor in bytes that ``activation_offload`` moves: ``saved_tensors.SMALL``."""
STAYING = 4
"""Tensors that it does not move, because backward needs them first: ``saved_tensors.WINDOW``."""
NOT_JOINED = 1 << 24
"""Smallest output in bytes that chunks do not keep beside the loss: ``late_rows.LARGE``."""
STATIC = {
    Kind.WEIGHTS: Memory.WEIGHTS,
    Kind.GRADIENTS: Memory.GRADIENTS,
    Kind.OPTIMIZER_STATE: Memory.OPTIMIZER_STATE,
}
REPLAYED = ("precision", "checkpointing", "micro_batch", "loss", "activation_offload")
"""Strategies whose effect on activations is replayed, not taken from a prior."""
EXACT = (*REPLAYED, "optimizer", "gradient_release", "zero_grad", "optimizer_offload", "batch_size")
"""Strategies without a prior for memory: their effect is computed from the script's own tensors."""
Array = npt.NDArray[np.float64]


class Predictor:
    """Predicts the memory of plans from one step of the script as it is."""

    def __init__(self, timeline: Timeline, facts: Facts) -> None:
        self._step = _Step(timeline)
        self._facts = facts

    def peak(self, plan: Plan) -> float:
        """Return the bytes of tensors at the peak under ``plan``."""
        if plan.neutral:
            return float(max(self._step.timeline.peaks))
        return _Replay(plan, self._step, self._facts).lives().peak()

    def kinds(self, plan: Plan) -> dict[str, int]:
        """Return the bytes of tensors at the peak under ``plan``, by kind of memory."""
        return _Replay(plan, self._step, self._facts).lives().kinds()


def predictable(plan: Plan, facts: Facts, *, cuda: bool) -> bool:
    """Return whether the prediction rests on measured bytes alone, and on no prior.

    On the CPU, attention with dropout keeps float32 under autocast, which the replay does not see.
    """
    if plan["precision"] in AUTOCAST and not cuda and any(root.dropout for root in facts.roots):
        return False
    return all(name in EXACT for name, _ in plan.changes)


def predicted_slowdown(plan: Plan, facts: Facts) -> float:
    """Return the expected step time under ``plan``, relative to the script as it is."""
    return expected(plan, facts)


def device_bytes(peak: float, *, allocated: int, reserved: int, context: int, cuda: bool) -> float:
    """Return the bytes that a process with this peak of tensors occupies on a GPU.

    Args:
        peak: Bytes of tensors.
        allocated: The peak of tensors in the script as it is.
        reserved: What torch's allocator held at that peak.
        context: Bytes beside the allocator.
        cuda: Whether the figures come from a GPU. Otherwise those of a typical GPU are assumed.
    """
    if not cuda:
        return float(total_bytes(peak, 1.0, CONTEXT))
    return peak * max(1.0, reserved / max(1, allocated)) + context


@dataclass(frozen=True, slots=True)
class _Lives:
    """Columns of lives; times are operations of the step, or fractions between two of them."""

    size: Array
    start: Array
    end: Array
    used: Array
    wanted: Array
    kind: npt.NDArray[np.str_]
    block: npt.NDArray[np.int64]
    of_block: npt.NDArray[np.bool_]
    returned: npt.NDArray[np.bool_]
    wide: npt.NDArray[np.bool_]
    quantized: npt.NDArray[np.bool_]
    moving: npt.NDArray[np.bool_]
    """Made in forward or backward by this step, and no gradient: grows with the batch."""

    def where(self, mask: Any, **changed: Any) -> _Lives:
        """Return the lives with columns changed where ``mask`` holds."""
        columns = {
            name: np.where(mask, value, getattr(self, name)) for name, value in changed.items()
        }
        return replace(self, **columns)

    def only(self, mask: Any) -> _Lives:
        """Return the lives for which ``mask`` holds."""
        return _Lives(*(getattr(self, name)[mask] for name in self.__slots__))

    def also(self, other: _Lives) -> _Lives:
        """Return the lives of both."""
        columns = (
            np.concatenate([getattr(self, name), getattr(other, name)]) for name in self.__slots__
        )
        return _Lives(*columns)

    def peak(self) -> float:
        """Return the most bytes that exist at once."""
        return self._peak()[0]

    def kinds(self) -> dict[str, int]:
        """Return the bytes by kind at the moment of the peak."""
        time = self._peak()[1]
        exists = (self.start <= time) & (self.end >= time)
        found: dict[str, int] = {}
        for kind in dict.fromkeys(self.kind[exists]):
            size = self.size[exists & (self.kind == kind)].sum()
            found[str(kind) or str(Kind.ACTIVATIONS)] = round(float(size))
        return found

    def _peak(self) -> tuple[float, float]:
        """Return the most bytes that exist at once, and when they do."""
        begins, ends = np.argsort(self.start), np.argsort(self.end)
        begun = np.cumsum(self.size[begins])
        gone = np.concatenate([[0.0], np.cumsum(self.size[ends])])
        before = np.searchsorted(self.end[ends], self.start[begins], side="left")
        last = np.searchsorted(self.start[begins], self.start[begins], side="right") - 1
        held = begun[last] - gone[before]
        if not len(held):
            return 0.0, 0.0
        at = int(np.argmax(held))
        return float(held[at]), float(self.start[begins][at])


def _made(size: Any, start: Any, end: Any) -> _Lives:
    """Return further lives, which no block has made."""
    number = len(size)
    no = np.zeros(number, dtype=bool)
    start, end = np.asarray(start, float), np.asarray(end, float)
    block = np.full(number, -1, dtype=np.int64)
    kind = np.full(number, "", dtype="<U16")
    return _Lives(np.asarray(size, float), start, end, start, end, kind, block, no, no, no, no, no)


class _Step:
    """The timeline of a step as the script has it, in columns."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.last = len(timeline.peaks) - 1

    @cached_property
    def plain(self) -> _Lives:
        """The lives, with what no tensor explains as lives of their own."""
        return self._columns(self.timeline.lives).also(self._unexplained)

    @cached_property
    def lowered(self) -> _Lives:
        """The same under autocast."""
        return self._columns(self.timeline.lowered).also(self._unexplained)

    def _columns(self, lives: tuple[Any, ...]) -> _Lives:
        columns = list(zip(*lives, strict=True))
        size, start, end, used, wanted = (np.array(each, float) for each in columns[:5])
        kind = np.array(columns[5], dtype=str)
        block = np.array(columns[6], dtype=np.int64)
        flags = [np.array(each, dtype=bool) for each in columns[7:]]
        phase = self._phases[start.astype(int)]
        of_block, returned, wide, quantized = flags
        return _Lives(
            size=size,
            start=start,
            end=end,
            used=used,
            wanted=wanted,
            kind=kind,
            block=block,
            of_block=of_block,
            returned=returned,
            wide=wide,
            quantized=quantized,
            moving=(kind == "") & (phase > 0),
        )

    @cached_property
    def _phases(self) -> npt.NDArray[np.int64]:
        """1 for operations of forward, 2 for those of backward, 0 for the others."""
        found = np.zeros(self.last + 1, dtype=np.int64)
        found[list(self.timeline.forward)] = 1
        found[list(self.timeline.backward)] = 2
        return found

    @cached_property
    def _unexplained(self) -> _Lives:
        """Return what the allocator gave out beside tensors, for each operation.

        The least of it is that of libraries and lasts; the rest is workspace of one operation.
        """
        plain = self._columns(self.timeline.lives)
        times = np.arange(self.last + 2)
        change = np.zeros(self.last + 2)
        np.add.at(change, plain.start.astype(int), plain.size)
        np.add.at(change, plain.end.astype(int) + 1, -plain.size)
        held = np.cumsum(change)[:-1]
        peaks = np.array(self.timeline.peaks, float)
        extra = np.where(peaks > 0, np.maximum(0.0, peaks - held), 0.0)
        known = extra[peaks > 0]
        floor = float(known.min()) if len(known) else 0.0
        at = np.nonzero(extra > floor)[0]
        found = _made(extra[at] - floor, times[at], times[at])
        found = replace(found, moving=self._phases[at] > 0)
        lasting = _made(np.array([floor]), np.array([0.0]), np.array([float(self.last)]))
        return found.also(lasting)


class _Replay:
    """The timeline of a step under one plan."""

    def __init__(self, plan: Plan, step: _Step, facts: Facts) -> None:
        timeline = step.timeline
        self._plan = plan
        self._step = step
        self._timeline = timeline
        self._facts = facts
        self._last = step.last
        self._batch_share = self._share_of_batch()
        self._chunk_share = self._share_of_chunk()
        self._forward = min(timeline.forward, default=0)
        self._backward = min(timeline.backward, default=self._last)
        self._backward_ends = max(timeline.backward, default=self._last)

    def lives(self) -> _Lives:
        """Return what exists in a step."""
        plan = self._plan
        lives = self._step.lowered if plan["precision"] in AUTOCAST else self._step.plain
        lives = self._optimizer(lives)
        if plan["loss"] != AS_IS:
            lives = self._chunked_loss(lives)
        if plan["micro_batch"] != AS_IS:
            lives = self._split(lives)
        lives = self._scaled(lives)
        if plan["activation_offload"] != AS_IS:
            lives = self._offloaded(lives)
        if plan["checkpointing"] != AS_IS:
            lives = self._checkpointed(lives)
        return lives

    # --- weights, gradients and state ------------------------------------------------------

    def _optimizer(self, lives: _Lives) -> _Lives:
        """Apply what a plan changes of weights, gradients and optimizer state."""
        plan = self._plan
        for kind, memory in STATIC.items():
            share = remaining_share(plan, memory)
            mask = lives.kind == kind
            if kind is Kind.OPTIMIZER_STATE and plan["optimizer"] == "eight_bit":
                mask = mask & lives.quantized
            lives = lives.where(mask, size=lives.size * share)
        gradients = lives.kind == Kind.GRADIENTS
        if plan["gradient_release"] != AS_IS:  # the optimizer steps within backward
            lives = lives.where(gradients, end=np.minimum(lives.end, lives.start + 2))
        if plan["zero_grad"] != AS_IS:
            wanted = np.minimum(lives.wanted, lives.end)
            lives = lives.where(gradients & (lives.start == 0), start=wanted)
        by_itself = plan["optimizer"] in ("fused", "eight_bit", "single")
        by_itself |= any(plan[name] != AS_IS for name in ("gradient_release", "optimizer_offload"))
        if by_itself:  # without the temporary tensors of torch's ``foreach`` kernels
            lives = lives.where((lives.kind == "") & ~lives.moving & self._in_step(lives), size=0.0)
        return lives

    def _in_step(self, lives: _Lives) -> Any:
        """Return which lives begin and end after backward."""
        return (lives.start > self._backward_ends) & (lives.end < self._last)

    # --- activations -----------------------------------------------------------------------

    def _scaled(self, lives: _Lives) -> _Lives:
        """Scale activations by the share of the batch, and by priors of other strategies."""
        share = self._batch_share
        for strategy, level in self._plan:
            if strategy.name in REPLAYED or strategy.drops_samples(level):
                continue
            if Memory.ACTIVATIONS in strategy.lowered(level):
                share *= strategy.expected_share(level, self._facts)
        return lives.where(lives.moving, size=lives.size * share)

    def _share_of_batch(self) -> float:
        batch = self._facts.batch
        return self._plan.samples(batch) / batch if batch else 1.0

    def _share_of_chunk(self) -> float:
        """Return the share of a call's samples that runs at once."""
        batch, size = self._facts.batch, self._plan["micro_batch"]
        if not batch or not size.isdecimal():
            return 1.0
        samples = self._plan.samples(batch)
        return min(samples, int(size)) / samples

    def _split(self, lives: _Lives) -> _Lives:
        """Run forward and backward in chunks; the last chunk has the peak.

        The gradients of the earlier chunks exist all the time, and a weight's new gradient exists
        beside their sum. If the model returns its loss, large outputs beside it are not kept. The
        others exist joined from the first chunk on, and a chunk keeps its own until its backward
        ends. If the model returns no loss, the outputs of the other chunks wait for it.
        """
        share = self._chunk_share
        gradients = (lives.kind == Kind.GRADIENTS) & (lives.start >= self._forward)
        earlier = lives.end[(lives.kind == Kind.GRADIENTS) & (lives.end < self._backward)]
        begin = float(max(self._forward, earlier.max(initial=-1) + 1))  # after ``zero_grad``
        output = lives.returned & lives.moving
        loss_inside = bool((output & (lives.size <= SCALAR)).any())
        if loss_inside:
            large = output & (lives.size >= NOT_JOINED)
            lives = lives.where(
                large, end=np.maximum(lives.start, np.minimum(lives.used, lives.end))
            )
            output = output & ~large
        others = lives.size[output].sum() * (1.0 if loss_inside else 1 - share)
        joined = _made([others], [self._forward], [self._backward_ends])
        new = _made(lives.size[gradients], lives.start[gradients], lives.start[gradients])
        if loss_inside:
            lives = lives.where(output, end=np.maximum(lives.end, self._backward_ends))
        lives = lives.where(lives.moving, size=lives.size * share)
        lives = lives.where(gradients, start=np.minimum(lives.start, begin))
        return lives.also(joined).also(new)

    def _chunked_loss(self, lives: _Lives) -> _Lives:
        """Compute head and loss in chunks of tokens, and their gradients within forward."""
        logits = lives.wide & lives.moving
        classes = max((root.classes for root in self._facts.roots), default=0)
        if not logits.any() or not classes:
            return lives
        tokens = max(each.size for each in self._timeline.lives if each.wide) // (FLOAT * classes)
        at = float(lives.start[logits & (lives.start < self._backward)].max(initial=self._forward))
        lives = lives.where(logits, size=0.0)
        share = self._chunk_share * self._batch_share
        chunk = tokens_in_chunk(max(1, int(tokens * share)), classes) / share * classes * FLOAT
        numbers = CHUNKS_OF_LOGITS - (1 if self._plan["precision"] in AUTOCAST else 0)
        made = [_made([numbers * chunk], [at], [at])]
        width = FLOAT * classes
        weights = [
            (size, start)
            for size, start in zip(
                lives.size[lives.kind == Kind.GRADIENTS],
                lives.start[lives.kind == Kind.GRADIENTS],
                strict=True,
            )
            if size > width and size % width == 0
        ]
        if weights:
            size, born = min(weights)
            made += [_made([size], [at], [max(at, born)])]
            made += [_made([size / classes * tokens], [at], [self._backward])]
        for index, each in enumerate(made):
            # The gradient of the weight does not grow with the batch.
            lives = lives.also(replace(each, moving=np.array([index != 1])))
        return lives

    def _offloaded(self, lives: _Lives) -> _Lives:
        """Move large activations to host memory between their uses in forward and backward."""
        share = 0.5 if self._plan["activation_offload"] == "half" else 1.0
        large = lives.moving & (lives.size >= OFFLOADED) & (lives.wanted < lives.end + 1)
        large &= (lives.start < self._backward) & (lives.wanted > self._backward)
        order = np.argsort(np.where(large, lives.start, np.inf), kind="stable")
        moved = order[: max(0, int(large.sum()) - STAYING)]
        mask = np.zeros(len(lives.size), dtype=bool)
        mask[moved[: round(len(moved) * share)]] = True
        back = lives.only(mask)
        back = replace(back, start=np.minimum(back.wanted, back.end))
        return lives.where(mask, end=np.minimum(lives.used, lives.end)).also(back)

    def _checkpointed(self, lives: _Lives) -> _Lives:
        """Free the activations of blocks after their forward, and run it again in backward."""
        number = len(self._timeline.blocks)
        level = self._plan["checkpointing"]
        if not number:
            share = strategies.get("checkpointing").expected_share(level, self._facts)
            return lives.where(lives.moving, size=lives.size * share)
        for block in range(number if level == ALL else count(level, number)):
            lives = self._rerun(lives, block)
        return lives

    def _rerun(self, lives: _Lives, block: int) -> _Lives:
        own = lives.moving & (lives.block == block) & (lives.start < self._backward)
        if not own.any():
            return lives
        enters, leaves = lives.start[own].min(), lives.start[own].max()
        saved = own & (lives.wanted <= lives.end) & (lives.wanted >= self._backward)
        freed = saved & ~lives.of_block
        if not freed.any():
            return lives
        begins = lives.wanted[freed].min()

        def again(time: Array) -> Array:
            """Return when an operation of the block runs again: just before ``begins``."""
            place = (np.clip(time, enters, leaves + 1) - enters) / (leaves + 2 - enters)
            return np.asarray(begins - 1 + 0.01 + 0.98 * place)

        workspace = lives.moving & (lives.block < 0) & (lives.start == lives.end)
        workspace &= (lives.start >= enters) & (lives.start <= leaves)
        back = lives.only(own | workspace)
        kept = back.wanted >= self._backward
        kept &= back.wanted <= back.end
        end = np.where(kept & ~back.of_block, back.end, again(np.minimum(back.end, back.used)))
        start = again(back.start)
        back = replace(back, start=start, end=np.maximum(start, end), block=back.block * 0 - 1)
        ended = np.maximum(lives.start, np.minimum(lives.used, lives.end))
        return lives.where(freed, end=ended).also(back)
