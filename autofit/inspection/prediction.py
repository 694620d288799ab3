"""Predicts the peak of a plan from what held the memory of the script as it is.

The arithmetic of ``autofit/space/static_memory.py`` says which share of weights, gradients and
state a plan keeps. The activations are not estimated: an inspection has measured them by block and
by type. Each phase of a step has its own peak, and the highest one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autofit import strategies
from autofit.facts import Facts
from autofit.plan import Plan
from autofit.space.order import expected
from autofit.space.static_memory import CONTEXT, remaining_share, total_bytes
from autofit.strategies import AS_IS, Memory
from autofit.strategies.checkpointing import ALL, count
from autofit.strategies.loss.chunks import tokens_in_chunk
from autofit.worker.records.inspection import Kind, Moment

OF_BLOCK = 0.5
"""Gradients of activations that backward of one recomputed block holds, relative to the block."""
HALF = ("bf16", "fp16")
"""Levels of ``precision`` that keep activations in 16 bits."""
BACKWARD, STEP = "backward", "optimizer step"
STATIC = {
    Kind.WEIGHTS: Memory.WEIGHTS,
    Kind.GRADIENTS: Memory.GRADIENTS,
    Kind.OPTIMIZER_STATE: Memory.OPTIMIZER_STATE,
}
MEASURED = ("precision", "checkpointing", "micro_batch", "loss", "activation_offload")
"""Strategies whose effect on activations is computed from measured bytes, not from a prior."""

EXACT = (*MEASURED, "optimizer", "gradient_release", "zero_grad", "optimizer_offload", "batch_size")
"""Strategies without a prior for memory: their effect is computed from the script's own tensors."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The bytes at one moment by kind; what no plan changes is in ``rest``."""

    static: float
    activations: float
    temporary: float
    rest: float

    @property
    def total(self) -> float:
        return self.static + self.activations + self.temporary + self.rest


def predicted_peak(plan: Plan, moments: Sequence[Moment], facts: Facts) -> float:
    """Return the bytes of tensors at the peak under ``plan``.

    ``moments``: the peaks of all phases of the script as it is.
    """
    if plan.neutral:
        return float(max(moment.peak for moment in moments))
    return max(size for moment in moments for size in _under(plan, moment, moments, facts))


def predictable(plan: Plan) -> bool:
    """Return whether the prediction rests on measured bytes alone, and on no prior."""
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


def _under(plan: Plan, moment: Moment, moments: Sequence[Moment], facts: Facts) -> list[float]:
    """Return the peaks that a moment leads to under ``plan``."""
    chunk = _chunk(plan, facts)
    now = _Sizes(
        static=_static(plan, moment, moments, chunk),
        activations=float(moment.of(Kind.ACTIVATIONS)),
        temporary=float(moment.of(Kind.TEMPORARY, Kind.WORKSPACE)),
        rest=float(moment.of(Kind.OTHER, Kind.LIBRARIES, Kind.ROUNDING)),
    )
    if moment.phase == STEP:
        return [_of_step(plan, now).total]
    share = chunk * _other_shares(plan, facts)
    kept, block = _remaining(plan, moment, facts)
    activations = kept * share
    cast = moment.cast / 2 if plan["precision"] in HALF and moment.activates else 0.0
    temporary = now.temporary * chunk
    if plan["loss"] != AS_IS:
        temporary = max(0.0, temporary - moment.logits * chunk) + _in_chunks(moment, facts, chunk)
    collected = moment.output * (1 - chunk)  # the outputs of all chunks wait for the loss
    whole = now.static + activations + temporary + now.rest + cast + collected
    if not block or moment.phase != BACKWARD:
        return [whole]
    # The logits are freed before a block runs again. The last block runs first.
    logits = min(moment.logits * share, activations)
    gradients = remaining_share(plan, Memory.GRADIENTS) * max(
        each.of(Kind.GRADIENTS) for each in moments
    )
    more = max(0.0, gradients - moment.of(Kind.GRADIENTS)) if chunk == 1 else 0.0
    rerun = now.static + block * share * (1 + OF_BLOCK) + now.rest + cast
    inputs = sum(each.given for each in moment.blocks) * share
    return [
        whole,
        rerun + activations - logits,
        rerun + max(0.0, activations - logits - inputs) + more,
    ]


def _static(plan: Plan, moment: Moment, moments: Sequence[Moment], chunk: float) -> float:
    """Return the bytes of weights, gradients and state at a moment."""
    total = 0.0
    for kind, memory in STATIC.items():
        size = float(moment.of(kind))
        if kind is Kind.GRADIENTS and chunk < 1:  # those of the chunks before
            size = float(max(each.of(kind) for each in moments))
        share = remaining_share(plan, memory)
        if kind is Kind.OPTIMIZER_STATE and plan["optimizer"] == "eight_bit":
            size -= moment.quantized * (1 - share)
            share = 1.0
        if plan["zero_grad"] != AS_IS and kind is Kind.GRADIENTS:
            share = 1.0 if moment.phase == STEP else 0.0
        total += size * share
    return total


def _of_step(plan: Plan, now: _Sizes) -> _Sizes:
    """Return the sizes in the optimizer's step: a fused or partial step has no workspace."""
    by_itself = plan["optimizer"] in ("fused", "eight_bit", "single")
    by_itself |= any(plan[name] != AS_IS for name in ("gradient_release", "optimizer_offload"))
    return _Sizes(now.static, now.activations, 0.0 if by_itself else now.temporary, now.rest)


def _chunk(plan: Plan, facts: Facts) -> float:
    """Return the share of a call's batch that runs at once."""
    batch = facts.batch
    if not batch:
        return 1.0
    samples = plan.samples(batch)
    size = plan["micro_batch"]
    return min(samples, int(size) if size.isdecimal() else samples) / batch


def _other_shares(plan: Plan, facts: Facts) -> float:
    """Return the expected share of activations under strategies without a measured effect."""
    share = 1.0
    for strategy, level in plan:
        if strategy.name in MEASURED or strategy.drops_samples(level):
            continue
        if Memory.ACTIVATIONS in strategy.lowered(level):
            share *= strategy.expected_share(level, facts)
    return share


def _in_chunks(moment: Moment, facts: Facts, chunk: float) -> float:
    """Return the bytes of logits, and their gradient, of one chunk of a chunked loss."""
    classes = max((root.classes for root in facts.roots), default=0)
    if not classes or not moment.logit:
        return 0.0
    tokens = int(moment.logit * chunk) // (4 * classes)
    return 2.0 * 4 * classes * min(tokens, tokens_in_chunk(tokens, classes))


def _remaining(plan: Plan, moment: Moment, facts: Facts) -> tuple[float, float]:
    """Return the activations of the whole batch that remain, and those of one block that reruns.

    Under checkpointing, a block keeps its input alone, which is the output of the block before.
    """
    activations = float(moment.of(Kind.ACTIVATIONS))
    halves = moment.halved / activations if activations else 0.0
    lower = 1.0 - (halves if plan["precision"] in HALF else 0.0)
    block = 0.0
    level = plan["checkpointing"]
    if level != AS_IS and moment.blocks:
        number = len(moment.blocks) if level == ALL else count(level, len(moment.blocks))
        rerun = moment.blocks[:number]
        inputs = max((each.given for each in moment.blocks), default=0)
        saved = sum(max(0, each.activations - inputs) for each in rerun)
        block = max((each.activations for each in rerun), default=0) * lower
        activations -= saved
        # Inputs are sums of residuals, which stay in float32.
        activations = (activations - inputs * number) * lower + inputs * number
    elif level != AS_IS:
        activations *= strategies.get("checkpointing").expected_share(level, facts) * lower
    else:
        activations *= lower
    if plan["loss"] != AS_IS:
        activations = max(0.0, activations - moment.logits)
    if plan["activation_offload"] != AS_IS:
        moved = moment.offloaded / (2 if plan["activation_offload"] == "half" else 1)
        activations = max(0.0, activations - moved * lower)
    return activations, block
