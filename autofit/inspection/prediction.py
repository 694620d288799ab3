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
from autofit.exceptions import Refused
from autofit.facts import Facts
from autofit.plan import Plan
from autofit.space.static_memory import CONTEXT, remaining_share, total_bytes
from autofit.strategies import AS_IS, Memory, Number
from autofit.strategies.support.block_levels import ALL, count
from autofit.worker.records.inspection import Kind, PlainSteps, Timeline

SCALAR = 8
"""Bytes of a number, such as a loss that the model returns."""
NOT_JOINED = 1 << 24
"""Smallest output in bytes that chunks do not keep beside the loss: ``late_rows.LARGE``."""
STATIC = {
    Kind.WEIGHTS: Memory.WEIGHTS,
    Kind.GRADIENTS: Memory.GRADIENTS,
    Kind.OPTIMIZER_STATE: Memory.OPTIMIZER_STATE,
}
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
        return _Replay(plan, self._step, self._facts).run().peak()

    def applies(self, plan: Plan) -> bool:
        """Return whether the tensors of the step show nothing that rules ``plan`` out."""
        try:
            self.peak(plan)
        except Refused:
            return False
        return True

    def kinds(self, plan: Plan) -> dict[str, int]:
        """Return the bytes of tensors at the peak under ``plan``, by kind of memory."""
        return _Replay(plan, self._step, self._facts).run().kinds()


def predictable(plan: Plan, facts: Facts, *, cuda: bool) -> bool:
    """Return whether the prediction rests on measured bytes alone, and on no prior.

    On the CPU, attention with dropout keeps float32 under autocast, which the replay does not see.
    """
    if plan.autocast and not cuda and any(root.dropout for root in facts.roots):
        return False
    return all(strategy.replays for strategy, _ in plan)


def beside_bytes(tensors: int, plain: PlainSteps | None) -> dict[str, int]:
    """Return what a process with these bytes of tensors holds beside them on a GPU, by kind.

    Args:
        tensors: Bytes at the peak.
        plain: The script as it is on a GPU. Without it, a typical GPU is assumed.
    """
    if plain is None:
        whole, context = total_bytes(tensors, 1.0, 0.0), CONTEXT
    else:
        whole = tensors * max(1.0, plain.reserved / max(1, plain.allocated))
        context = plain.device - plain.reserved
    return {str(Kind.CACHE): round(whole) - tensors, str(Kind.CONTEXT): round(context)}


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
    of_weight: npt.NDArray[np.bool_]
    moving: npt.NDArray[np.bool_]
    """Made in forward or backward by this step, and no gradient."""

    @property
    def growing(self) -> npt.NDArray[np.bool_]:
        """Those that grow with the batch."""
        return self.moving & ~self.of_weight

    def where(self, mask: Any, **changed: Any) -> _Lives:
        """Return the lives with columns changed where ``mask`` holds."""
        columns = {
            name: np.where(mask, value, getattr(self, name)) for name, value in changed.items()
        }
        return replace(self, **columns)

    def only(self, mask: Any) -> _Lives:
        """Return the lives for which ``mask`` holds."""
        return _Lives(*(getattr(self, name)[mask] for name in self.__slots__))

    def also(self, *others: _Lives) -> _Lives:
        """Return the lives of all."""
        columns = (
            np.concatenate([getattr(each, name) for each in (self, *others)])
            for name in self.__slots__
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
    flags = (no,) * 6
    return _Lives(np.asarray(size, float), start, end, start, end, kind, block, *flags)


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
        of_block, returned, wide, quantized, of_weight = flags
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
            of_weight=of_weight,
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
        self._timeline = timeline
        self.facts = facts
        self._last = step.last
        self._batch_share = plan.samples(facts.batch) / facts.batch if facts.batch else 1.0
        self._chunk_share = self._share_of_chunk()
        self.forward = min(timeline.forward, default=0)
        self.backward = min(timeline.backward, default=self._last)
        self._backward_ends = max(timeline.backward, default=self._last)
        self.half = plan.autocast is not None
        self.plain = self.lives = step.lowered if self.half else step.plain

    def run(self) -> _Lives:
        """Return what exists in the step."""
        plan = self._plan
        self._scale_static()
        later = [strategy.replay(level, self) for strategy, level in reversed([*plan])]
        if plan.splits:
            self.lives = self._split(self.lives)
        self.lives = self._scaled(self.lives)
        for change in later:
            if change is not None:
                change()
        return self.lives if plan.blocks == AS_IS else self._checkpointed(self.lives)

    @property
    def share(self) -> float:
        """The share of a call's samples that runs at once."""
        return self._chunk_share * self._batch_share

    @property
    def returns_loss(self) -> bool:
        """Whether the model returns a number, such as a loss."""
        plain = self.plain
        return bool((plain.returned & plain.moving & (plain.size <= SCALAR)).any())

    @property
    def tokens(self) -> int:
        """The bytes of the largest output of the model's head in a call of the script as it is."""
        return max((each.size for each in self._timeline.lives if each.wide), default=0)

    def made(self, size: Any, start: Any, end: Any) -> _Lives:
        """Return further lives, which no block has made."""
        return _made(size, start, end)

    # --- weights, gradients and state ------------------------------------------------------

    def _scale_static(self) -> None:
        """Scale weights, gradients and optimizer state by what the plan leaves of them."""
        lives = self.lives
        for kind, memory in STATIC.items():
            share = remaining_share(self._plan, memory)
            lives = lives.where(lives.kind == kind, size=lives.size * share)
        self.lives = lives

    def step_by_parameter(self) -> None:
        """Free the temporary tensors of torch's ``foreach`` kernels, which hold all parameters."""
        lives = self.lives
        in_step = (lives.start > self._backward_ends) & (lives.end < self._last)
        self.lives = lives.where((lives.kind == "") & ~lives.moving & in_step, size=0.0)

    # --- activations -----------------------------------------------------------------------

    def _scaled(self, lives: _Lives) -> _Lives:
        """Scale activations by the share of the batch, and by priors of other strategies."""
        share = self._batch_share
        for strategy, level in self._plan:
            if strategy.replays:
                continue
            if Memory.ACTIVATIONS in strategy.lowered(level):
                share *= strategy.expected_share(level, self.facts)
        return lives.where(lives.growing, size=lives.size * share)

    def _share_of_chunk(self) -> float:
        """Return the share of a call's samples that runs at once."""
        batch, size = self.facts.batch, self._plan.chunk
        if not batch or size is None:
            return 1.0
        samples = self._plan.samples(batch)
        return min(samples, size) / samples

    def _split(self, lives: _Lives) -> _Lives:
        """Run forward and backward in chunks; the last chunk has the peak.

        The gradients of the earlier chunks exist all the time, and a weight's new gradient exists
        beside their sum. If the model returns its loss, large outputs beside it are not kept. The
        others exist joined from the first chunk on, and a chunk keeps its own until its backward
        ends. If the model returns no loss, the outputs of the other chunks wait for it.
        """
        share = self._chunk_share
        gradients = (lives.kind == Kind.GRADIENTS) & (lives.start >= self.forward)
        earlier = lives.end[(lives.kind == Kind.GRADIENTS) & (lives.end < self.backward)]
        begin = float(max(self.forward, earlier.max(initial=-1) + 1))  # after ``zero_grad``
        output = lives.returned & lives.moving
        if self.returns_loss:
            large = output & (lives.size >= NOT_JOINED)
            lives = lives.where(
                large, end=np.maximum(lives.start, np.minimum(lives.used, lives.end))
            )
            output = output & ~large
        others = lives.size[output].sum() * (1.0 if self.returns_loss else 1 - share)
        joined = self.made([others], [self.forward], [self._backward_ends])
        new = self.made(lives.size[gradients], lives.start[gradients], lives.start[gradients])
        if self.returns_loss:
            lives = lives.where(output, end=np.maximum(lives.end, self._backward_ends))
        lives = lives.where(lives.growing, size=lives.size * share)
        lives = lives.where(gradients, start=np.minimum(lives.start, begin))
        return lives.also(joined).also(new)

    def _checkpointed(self, lives: _Lives) -> _Lives:
        """Free the activations of blocks after their forward, and run it again in backward."""
        number = len(self._timeline.blocks)
        level = self._plan.blocks
        if not number:
            share = strategies.counting(Number.BLOCKS).expected_share(level, self.facts)
            return lives.where(lives.moving, size=lives.size * share)
        backward = self._backward_after(lives.start)
        early = lives.moving & ~np.isin(lives.start, self._timeline.backward)
        saved = early & (lives.wanted <= lives.end) & (lives.wanted >= backward)
        rerun = lives.block < (number if level == ALL else count(level, number))
        freed = saved & ~lives.of_block & rerun & (lives.block >= 0)
        again = []
        for block, begins in {*zip(lives.block[freed], backward[freed], strict=True)}:
            own = (lives.block == block) & (backward == begins)
            again.append(self._rerun(lives, early & own, freed & own, begins))
        ended = np.maximum(lives.start, np.minimum(lives.used, lives.end))
        return lives.where(freed, end=ended).also(*again)

    def _backward_after(self, time: Array) -> Array:
        """Return the first operation of the backward pass that follows; no later than the last.

        A step has several passes if its calls accumulate gradients.
        """
        within = np.array(sorted(self._timeline.backward), float)
        forward = np.array(sorted(self._timeline.forward), float)
        if not len(within):
            return np.full(len(time), float(self._last))
        last_forward = np.concatenate([[-1.0], forward])[
            np.searchsorted(forward, within, side="right")
        ]
        first = within[np.unique(last_forward, return_index=True)[1]]
        at = np.searchsorted(first, time, side="right")
        return np.concatenate([first, [first[-1]]])[at]

    def _rerun(self, lives: _Lives, own: Any, freed: Any, backward: float) -> _Lives:
        """Return what a block makes again.

        Args:
            lives: All of the step.
            own: Those of the block's forward.
            freed: Those of them that it makes again.
            backward: The first operation of its backward pass.
        """
        enters, leaves = lives.start[own].min(), lives.start[own].max()
        begins = lives.wanted[freed].min()

        def again(time: Array) -> Array:
            """Return when an operation of the block runs again: just before ``begins``."""
            place = (np.clip(time, enters, leaves + 1) - enters) / (leaves + 2 - enters)
            return np.asarray(begins - 1 + 0.01 + 0.98 * place)

        workspace = lives.moving & (lives.block < 0) & (lives.start == lives.end)
        workspace &= (lives.start >= enters) & (lives.start <= leaves)
        back = lives.only(own | workspace)
        kept = back.wanted >= backward
        kept &= back.wanted <= back.end
        end = np.where(kept & ~back.of_block, back.end, again(np.minimum(back.end, back.used)))
        start = again(back.start)
        return replace(back, start=start, end=np.maximum(start, end), block=back.block * 0 - 1)
