"""Checks on a few samples whether a plan keeps its promise on this model and batch.

The same samples run without the plan and under it, with the same random draws. In float64, outputs,
gradients and changes of state must be equal: what a plan does beside rounding shows there. A plan
that rounds then runs once in its own kernels, and may differ by the rounding of its precision.
Compiled code, and a model that cannot run in float64, are compared in their own precision.
``split_check`` verifies separately how the chunks of a batch are joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from autofit.exceptions import Refused
from autofit.facts import Facts
from autofit.plan import Plan
from autofit.strategies import Number
from autofit.strategies.base import Deferred, Fidelity, Forward, Strategy
from autofit.strategies.support.block_levels import ALL
from autofit.worker.harness.batch.layout import Batch, Layout, equal_cuts
from autofit.worker.harness.torch_state.compile_state import uncompiled
from autofit.worker.harness.torch_state.host_saved import saved_on_host
from autofit.worker.harness.torch_state.module_state import (
    Change,
    NewValue,
    different_updates,
    updates_since,
)
from autofit.worker.harness.torch_state.modules import (
    gathered,
    is_paged,
    moves_together,
    without_cache,
)
from autofit.worker.harness.torch_state.reachable_state import Key
from autofit.worker.harness.torch_state.rng import autocast_on
from autofit.worker.harness.verification.checked_root import CheckedRoot, checkpointed_blocks
from autofit.worker.harness.verification.fixed_draws import without_dropout
from autofit.worker.harness.verification.float64 import CannotRun, in_float64, soon, widened_batch
from autofit.worker.harness.verification.gradient_digest import (
    Digest,
    coefficients,
    differences,
    digest,
    fold,
    largest_factor,
    length,
    mean_difference,
    pattern,
)
from autofit.worker.harness.verification.proof_cache import Sensitivity
from autofit.worker.harness.verification.shifted_weights import (
    ShiftedWeights,
    moving,
    near,
    to_bf16,
    vectors_shifted,
)
from autofit.worker.harness.verification.short_of_memory import checking
from autofit.worker.harness.verification.split_check import (
    REENTRANT,
    batched_arguments,
    few,
    pointing,
    preserved,
)
from autofit.worker.harness.verification.split_rules import is_number
from autofit.worker.harness.verification.tolerances import TOLERANCES
from autofit.worker.harness.verification.ways import SAMPLES, Way, first_that_runs
from autofit.worker.oom.attempt import AttemptOutcome, attempt, attempt_model
from autofit.worker.records.trials import NOT_COMPARABLE


class Effects(NamedTuple):
    """What a call does."""

    outputs: Digest
    gradients: Digest
    updates: dict[Key, Change | NewValue]
    """The changes of the state that the call can reach."""


UNREPEATABLE = (
    "the same samples have other gradients at a second time without the plan, as they have where a"
    " forward sets weights"
)
CHECKPOINTED = Plan().with_number(Number.BLOCKS, ALL)
"""Once verified, it replaces the plain model where that does not fit."""


@checking()
def prove(
    root: CheckedRoot, plan: Plan, args: Any, kwargs: Any, facts: Facts, *, known: bool = False
) -> bool:
    """Apply ``plan`` to ``root`` and compare; raise ``Refused`` if the promise does not hold.

    ``known``: an earlier check has passed. It still counts unless the plan depends on the batch
    size, or the tolerance depends on noise, which every process measures with its own weights.
    Returns whether a check ran. A shortage of memory is marked as one of a check.
    """
    root.proof.difference = None
    in_calls = plan.in_calls
    noisy = _has_batch_statistics(root) and in_calls.fidelity(facts) is Fidelity.ROUNDING
    known = known and not any(strategy.sized for strategy, _ in in_calls)
    known = known and (root.proof.noise_measured_here or not noisy)
    if known or not shows_in_calls(plan, facts):
        root.apply(plan)
        return False
    root.proof.proofs += 1
    if noisy:
        # The sensitivity of other weights may be too small for these.
        root.proof.noise_measured_here, root.proof.sensitivity = True, None
    kwargs = without_cache(root.module, kwargs)
    for strategy, level in in_calls:
        args, kwargs = strategy.checkable_call(level, args, kwargs)
    redraws = any(s.redraws or s.fidelity(level, facts) is Fidelity.REDRAW for s, level in in_calls)
    plain = Strategy.checkable_call
    adapting = (s.name for s, _ in in_calls if type(s).checkable_call is not plain)
    check = partial(
        _prove_and_blame, root, plan, Batch.of(args, kwargs), facts, call=(redraws, *adapting)
    )
    with without_dropout(root.module) if redraws else nullcontext():
        if not plan.compiles and root.facts is not None and root.facts.compiled:
            _check_uncompiled(root, check, alone=facts.world_size == 1)
        else:
            check()
    return True


def shows_in_calls(plan: Plan, facts: Facts) -> bool:
    """Return whether ``plan`` touches calls of a root, and promises the same results."""
    in_calls = plan.in_calls
    return not in_calls.neutral and in_calls.fidelity(facts) is not Fidelity.RECIPE


def _check_uncompiled(root: CheckedRoot, check: Callable[[], None], *, alone: bool) -> None:
    """Check a plan without the script's own ``torch.compile``, which is not meant for few samples.

    If memory is too small, check with it: fused code may need much less memory. Several ranks do
    not retry, because the other ranks might have had enough memory.
    """
    with uncompiled():
        if not alone:
            check()
            return
        fits = attempt(check).fits
    if not fits:
        root.proof.plain_results.clear()
        check()


def _prove(
    root: CheckedRoot, plan: Plan, batch: Batch, facts: Facts, *, call: tuple[object, ...]
) -> None:
    """Apply ``plan`` and compare; ``call`` describes how the call differs from the script's own.

    For compiled code that does not round, biases and norms move a little: an error that only
    appears once they are trained must appear here. For a plan that rounds, the noise of the present
    weights is the measure.
    """
    unsized = plan.unsized
    root.take_back()
    neutral = unsized.in_calls.neutral
    try:
        equal = neutral or _is_equal_in_float64(root, unsized, batch, facts, call)
        rounds = plan.in_calls.fidelity(_as_cast(root, facts)) is Fidelity.ROUNDING
        call = (rounds, *call)
        with nullcontext() if rounds else vectors_shifted(root.module):
            if not neutral and (rounds or not equal):
                root.take_back()
                expected, found = _effects_with_and_without(root, unsized, batch, call)
                _compare(root, unsized, facts, found, expected, batch, call)
            elif root.plan != unsized:
                root.apply(unsized)
            if unsized == plan:
                return
            # The rest of the plan has just been checked; it is the reference here.
            some = _samples(batch, _chunk(plan, batch))
            # Outputs that nothing computes need memory for all samples; they are compared already.
            expected = _effects_under_plan(root, some, lazy=False)
            root.apply(plan)
            found = _effects(root, root.forward, some, lazy=False)
            _compare(root, plan, facts, found, expected, batch, call)
    except RuntimeError as failure:
        if "use_reentrant" not in str(failure):
            raise
        root.take_back()
        raise Refused(REENTRANT) from None


def _prove_and_blame(
    root: CheckedRoot, plan: Plan, batch: Batch, facts: Facts, *, call: tuple[object, ...]
) -> None:
    """Check as ``_prove`` does; name the strategy at fault if a plan of several is refused.

    Each strategy is checked alone, those that round first. The one at fault is refused alone too,
    or it is the only one that memory has no room to check. Otherwise their combination fails, and
    no name is given. If the ranks communicate in a forward, nothing more is run, because the other
    ranks may not have refused: the only strategy that rounds is named.
    """
    try:
        _prove(root, plan, batch, facts, call=call)
        return
    except Refused as failure:
        levels = sorted(plan.unsized.in_calls, key=lambda each: -each[0].fidelity(each[1], facts))
        if failure.strategy is not None or len(levels) < 2:
            raise
        refusal = Refused(str(failure))  # a new error: the frames of the first hold tensors
    rounding = [s.name for s, level in levels if s.fidelity(level, facts) is Fidelity.ROUNDING]
    if _communicates(root.module):
        raise Refused(str(refusal), rounding[0] if len(rounding) == 1 else None)
    unchecked: list[str] = []
    for strategy, level in levels:
        check = partial(_prove, root, Plan.of({strategy.name: level}), batch, facts, call=call)
        try:
            if not attempt(check).fits:
                unchecked.append(strategy.name)
        except Refused as alone:
            raise Refused(str(alone), strategy.name) from None
    raise Refused(str(refusal), unchecked[0] if len(unchecked) == 1 else None)


def _communicates(module: nn.Module) -> bool:
    """Return whether a forward of ``module`` is known to communicate with other ranks."""
    shared = any(isinstance(each, nn.SyncBatchNorm) for each in module.modules())
    return shared or moves_together(module)


def _is_equal_in_float64(
    root: CheckedRoot, plan: Plan, batch: Batch, facts: Facts, call: tuple[object, ...]
) -> bool:
    """Apply ``plan``, and return whether float64 could decide that it changes nothing.

    If one of its kernels has no float64, or if it rounds and differs by no more than rounding, the
    levels without rounding are compared alone. Raises ``Refused`` if there is a difference.
    """
    exact = Plan.of({s.name: v for s, v in plan if s.fidelity(v, facts) < Fidelity.ROUNDING})
    for some in dict.fromkeys((plan, exact)):
        if some.in_calls.neutral or (both := _in_float64(root, some, batch, call)) is None:
            continue
        under, plain, unsteady = both
        allowed = TOLERANCES.double if some == exact else TOLERANCES.double_rounding
        if _difference_in_float64(root, some, under, plain, unsteady, allowed) <= TOLERANCES.double:
            return some == plan
    return False


def _difference_in_float64(
    root: CheckedRoot,
    plan: Plan,
    under: Effects,
    plain: Effects,
    unsteady: Callable[[], frozenset[str]],
    allowed: float,
) -> float:
    """Return the relative difference; raise ``Refused`` if it is more than ``allowed``.

    State must be equal in any case, but for what ``unsteady`` returns: that is equal in no two
    runs.
    """
    blamed = _blamed(plan)
    _require_finite(plain, blamed)
    root.proof.difference = mean_difference(under.gradients, plain.gradients)
    state = different_updates(under.updates, plain.updates, exact=TOLERANCES.double)
    if state:
        excused = unsteady()
        state = [name for name in state if name not in excused]
    _refuse_state(state, blamed)
    if len(under.outputs) != len(plain.outputs):
        raise Refused("the model returns a different number of outputs under the plan", blamed)
    largest = 0.0
    for what, found, expected in (
        ("gradients", under.gradients, plain.gradients),
        ("outputs", under.outputs, plain.outputs),
    ):
        error = max(differences([found], expected), default=0.0) if expected else 0.0
        if error > allowed:
            unsteady()
            told = _difference_text(f"by {error:.1e}, {allowed:.1e} allowed", what)
            raise Refused(told, blamed)
        largest = max(largest, error)
    return largest


def _in_float64(
    root: CheckedRoot, applied: Plan, batch: Batch, call: tuple[object, ...]
) -> tuple[Effects, Effects, Callable[[], frozenset[str]]] | None:
    """Apply a plan; return the effects under it and without it, ``None`` if float64 cannot run.

    Compiled code hides its operations from the modes that widen them. A model whose forward
    communicates would wait for ranks that do not run this.
    """
    if applied.compiles or _communicates(root.module):
        return None
    size = _size(batch)
    whole = bool(size and pointing(batch, _layout(batch)))
    sizes = dict.fromkeys((size,) if whole else (SAMPLES, _fewest_samples(root), size))

    def run(way: Way) -> AttemptOutcome[tuple[Effects, Effects, Batch]]:
        samples = widened_batch(_samples(batch, way.samples))
        both = partial(_both_in_float64, root, applied, samples, (way, *call))
        outcome = attempt_model(lambda: (*both(), samples))
        return AttemptOutcome() if isinstance(outcome.failure, CannotRun) else outcome

    found = first_that_runs((Way(each, wide=True) for each in sizes), run).value
    if found is None:
        return None
    under, plain, samples = found
    return under, plain, partial(_unsteady, root, applied, samples, plain)


def _both_in_float64(
    root: CheckedRoot, applied: Plan, samples: Batch, key: tuple[object, ...]
) -> tuple[Effects, Effects]:
    plain = root.proof.plain_results.get(key)
    if plain is None:
        root.take_back()
        with autocast_noticed(root), soon(root.module, forwards=3.0):
            plain = _plain_in_float64(root, samples)
        root.proof.plain_results[key] = plain
    dtypes = [parameter.dtype for parameter in root.module.parameters()]
    root.apply(applied)  # outside of float64, which restores attributes of modules
    if [parameter.dtype for parameter in root.module.parameters()] != dtypes:
        raise CannotRun("the plan holds the weights in another precision")
    with uncompiled(), in_float64(root.module, near) as weights:
        return _effects(root, root.forward, samples, weights=weights), plain


def _plain_in_float64(root: CheckedRoot, samples: Batch) -> Effects:
    with uncompiled(), in_float64(root.module, near) as weights:
        return _effects(root, root.plain, samples, weights=weights)


def _unsteady(root: CheckedRoot, applied: Plan, samples: Batch, plain: Effects) -> frozenset[str]:
    """Return the state that differs between two plain runs, such as a stored time.

    Raises ``Refused`` if their gradients differ, so that nothing can be said of the plan.
    """
    root.take_back()
    again = _plain_in_float64(root, samples)
    root.apply(applied)
    if max(differences([again.gradients], plain.gradients), default=0.0) > TOLERANCES.double:
        raise Refused(UNREPEATABLE, _blamed(applied))
    state = different_updates(plain.updates, again.updates, exact=TOLERANCES.double)
    return frozenset(state)


def _effects_under_plan(root: CheckedRoot, batch: Batch, *, lazy: bool = True) -> Effects:
    """Return the effects of a call under the applied plan; ``lazy`` as for ``_effects``.

    If the samples do not fit, autograd's saved tensors go to host memory.
    """
    if moves_together(root.module):
        return _effects(root, root.forward, batch, lazy=lazy)
    outcome = attempt(lambda: _effects(root, root.forward, batch, lazy=lazy))
    if outcome.fits:
        return outcome.result()
    with saved_on_host(root.module.parameters()):
        return _effects(root, root.forward, batch, lazy=lazy)


def _effects_with_and_without(
    root: CheckedRoot, plan: Plan, batch: Batch, call: tuple[object, ...]
) -> tuple[Effects, Effects]:
    """Apply ``plan``; return the effects of a few samples without it and under it.

    All samples run if the model cannot run on a few: the nodes of a graph, or a batch with state
    from the previous call.
    """
    ways, size = _ways(root), _size(batch)
    every = dict.fromkeys(replace(way, samples=size) for way in ways)
    some = [] if size and pointing(batch, _layout(batch)) else ways
    run = partial(_effects_of_way, root, plan, batch, call)
    outcome = first_that_runs([*some, *every], run)
    if not outcome.fits:
        root.take_back()
    return outcome.result()


def _ways(root: CheckedRoot) -> list[Way]:
    """Return the ways to run samples without a plan; each is tried if those before do not fit.

    These are: a few samples; one; one with checkpointed blocks, if checkpointing was verified; one
    with autograd's saved tensors in host memory. A sharded model gets only a way that is sure to
    fit, and so does one that is paged: that fits in no way without checkpointed blocks, so these
    are not compared with others.
    """
    fewest = _fewest_samples(root)
    # Batch statistics of very few samples are mostly noise.
    enough = 4 * SAMPLES if _has_batch_statistics(root) else SAMPLES
    several, one, on_host = Way(enough), Way(fewest), Way(fewest, on_host=True)
    can = checkpointed_blocks(root, root.facts, root.plan)
    checkpointed = None if can is None else Way(fewest, around=can)
    if is_paged(root.module):
        return [checkpointed or on_host]
    if moves_together(root.module):
        return [several if root.whole_fits() else on_host]
    if checkpointed is not None and root.proof.is_known(CHECKPOINTED):
        return [several, one, checkpointed, on_host]
    return [several, one, on_host]


def _effects_of_way(
    root: CheckedRoot, plan: Plan, batch: Batch, call: tuple[object, ...], way: Way
) -> AttemptOutcome[tuple[Effects, Effects]]:
    """Apply ``plan``; return the effects of some samples without it and under it.

    A model may support no such samples. An error under the plan is raised: it is the plan's fault.
    A sharded model raises all, because its ranks would no longer match after one.
    """
    trial = _directly if moves_together(root.module) else attempt_model
    plain = trial(partial(_plain_effects, root, batch, call, way))
    if plain.value is None:
        return AttemptOutcome(shortage=plain.shortage, failure=plain.failure)
    under = partial(_effects_in_way, root, plan, _samples(batch, way.samples), way)
    found = (_directly if moves_together(root.module) else attempt)(under)
    if found.value is None:
        return AttemptOutcome(shortage=found.shortage)
    return AttemptOutcome((plain.value, found.value))


def _directly(run: Callable[[], Effects]) -> AttemptOutcome[Effects]:
    return AttemptOutcome(run())


def _plain_effects(root: CheckedRoot, batch: Batch, call: tuple[object, ...], way: Way) -> Effects:
    """Return the effects without a plan; later checks in the same call reuse them."""
    plain: Effects | None = root.proof.plain_results.get((way, *call))
    if plain is None:
        root.take_back()
        with way.saving(root.module), autocast_noticed(root):
            plain = _effects(root, root.plain, _samples(batch, way.samples))
        root.proof.plain_results[way, *call] = plain
    return plain


def _effects_in_way(root: CheckedRoot, plan: Plan, samples: Batch, way: Way) -> Effects:
    root.apply(plan)
    if is_paged(root.module) and checkpointed_blocks(root, root.facts, root.plan) is None:
        way = Way(way.samples)  # the plan checkpoints the blocks itself
    if way == Way(way.samples) or moves_together(root.module):
        with way.saving(root.module):
            return _effects(root, root.forward, samples)
    return _effects_under_plan(root, samples)


def _fewest_samples(root: CheckedRoot) -> int:
    return 2 if _has_batch_statistics(root) else 1


def _has_batch_statistics(root: CheckedRoot) -> bool:
    """Return whether the model computes batch statistics, which amplify rounding."""
    return root.facts is not None and root.facts.batch_norm


def _blamed(plan: Plan) -> str | None:
    """Return the only strategy that may be at fault; ``None`` if there are several."""
    names = [s.name for s, _ in plan.in_calls if s.sized] or [s.name for s, _ in plan.in_calls]
    return names[0] if len(names) == 1 else None


def _compare(
    root: CheckedRoot,
    applied: Plan,
    facts: Facts,
    under: Effects,
    expected: Effects,
    batch: Batch,
    call: tuple[object, ...],
) -> bool:
    """Raise ``Refused`` unless the effects agree as closely as ``applied`` promises.

    ``batch``: the call that was compared; ``call``: its description. Returns whether the direction
    of the gradients was compared: if rounding alone changes their direction, only their size can
    be. Several ranks return ``False`` together if one of them might.
    """
    plan, blamed = applied.in_calls, _blamed(applied)
    _require_finite(expected, blamed)
    root.proof.difference = mean_difference(under.gradients, expected.gradients)
    try:
        if plan.fidelity(_as_cast(root, facts)) is Fidelity.ROUNDING:
            return _compare_rounded(root, applied, facts, under, expected, batch, call)
        _compare_exact(under, expected)
    except Refused as refusal:
        raise Refused(str(refusal), blamed) from None
    return True


def _compare_exact(under: Effects, expected: Effects) -> None:
    """Raise ``Refused`` unless the effects agree up to the order of sums, in their own precision.

    Where the order makes more, the share of the plain gradients in those under the plan decides.
    """
    error = max(differences([under.gradients], expected.gradients), default=0.0)
    sure = error <= TOLERANCES.single_gradients
    tolerance = TOLERANCES.single_gradients if sure else TOLERANCES.residual
    _refuse_state(different_updates(under.updates, expected.updates, exact=tolerance))
    if sure:
        return
    shares, _, rest = coefficients([expected.gradients], under.gradients)
    off = max((abs(share - 1.0) for share in shares), default=0.0)
    if off > TOLERANCES.coefficient or rest > TOLERANCES.residual:
        raise Refused(
            _difference_text(f"by {error:.1e}, {TOLERANCES.single_gradients:.1e} allowed")
        )


def _compare_rounded(
    root: CheckedRoot,
    applied: Plan,
    facts: Facts,
    under: Effects,
    expected: Effects,
    batch: Batch,
    call: tuple[object, ...],
) -> bool:
    """Raise ``Refused`` unless the gradients differ by no more than rounding explains.

    Returns whether the direction of the gradients was compared: see ``_compare``.
    """
    error = mean_difference(under.gradients, expected.gradients)
    state = different_updates(under.updates, expected.updates)
    alone = facts.world_size == 1 and not is_paged(root.module)
    doubtful = error > TOLERANCES.rounding / 2 or bool(state)
    if not alone:  # all ranks must decide alike: an extra forward would hang collectives
        doubtful = _has_batch_statistics(root) and not _communicates(root.module)
    if doubtful and root.proof.sensitivity is None:
        root.proof.sensitivity = _sensitivity(root, applied, batch, call)
    allowed, chaos = TOLERANCES.rounding, False
    if (noise := root.proof.sensitivity) is not None:
        most = TOLERANCES.noise * noise.gradients
        chaos = most > TOLERANCES.most
        allowed = max(allowed, min(most, TOLERANCES.most))
        far = different_updates(under.updates, expected.updates, None if chaos else TOLERANCES.most)
        state = far if chaos else [n for n in state if n in far or n not in noise.buffers]
    _refuse_state(state)
    if error <= allowed:
        return alone or not doubtful
    figures = f"by {error:.1e}, {allowed:.1e} allowed"
    if chaos:
        factor = largest_factor(under.gradients, expected.gradients)
        if factor <= TOLERANCES.factor:
            return False
        figures = f"in size, {factor:.2g} times, {TOLERANCES.factor} allowed"
    raise Refused(_difference_text(figures))


def _refuse_state(differing: list[str], blamed: str | None = None) -> None:
    if differing:
        raise Refused(f"the model's {differing[0]} would change differently under the plan", blamed)


def _difference_text(figures: str, what: str = "gradients") -> str:
    return f"the {what} differ from the plain model's {figures}"


def _as_cast(root: CheckedRoot, facts: Facts) -> Facts:
    """Return ``facts``, with autocast if the root enters it by itself."""
    return replace(facts, autocast=facts.autocast or root.proof.autocasts)


def _sensitivity(
    root: CheckedRoot, plan: Plan, batch: Batch, call: tuple[object, ...]
) -> Sensitivity | None:
    """Return how the plain root reacts when weights and inputs are rounded to bf16 once.

    The computation itself keeps the script's precision. A model amplifies this small difference as
    it amplifies the rounding of any lower precision. With BatchNorm at random initialisation, the
    gradients differ by tens of per cent. ``None`` if no samples fit. ``plan`` is applied again
    afterwards.
    """
    root.take_back()
    size, ways = _size(batch), _ways(root)

    def run(way: Way) -> Sensitivity:
        samples = _samples(batch, way.samples)
        with way.saving(root.module):
            plain = root.proof.plain_results.get((way, *call))
            plain = plain or _effects(root, root.plain, samples)
            with moving(root.module, to_bf16) as weights:
                # No name holds the rounded samples: after a shortage they must be free.
                found = _effects(
                    root,
                    root.plain,
                    Batch([_rounded(leaf) for leaf in samples.leaves], samples.spec),
                    weights=weights,
                )
        buffers = frozenset(different_updates(found.updates, plain.updates))
        return Sensitivity(mean_difference(found.gradients, plain.gradients), buffers)

    try:
        every = [*ways, *(replace(way, samples=size) for way in ways)]
        return first_that_runs(every, lambda way: attempt_model(partial(run, way))).value
    finally:
        root.apply(plan)


def _rounded(leaf: Any) -> Any:
    """Return a float32 tensor rounded to bf16; anything else as it is."""
    if not isinstance(leaf, torch.Tensor) or leaf.dtype is not torch.float32:
        return leaf
    return leaf.detach().bfloat16().float().requires_grad_(leaf.requires_grad)


def _layout(batch: Batch) -> Layout:
    return Layout(0, batched_arguments(batch, 0), ())


def _size(batch: Batch) -> int:
    """Return the samples in a call; 0 if no argument shows them."""
    layout = _layout(batch)
    return layout.size(batch) if layout.batched else 0


def _samples(batch: Batch, most: int) -> Batch:
    """Return a copy of the first samples, because the model may change its arguments."""
    return few(batch, _layout(batch), range(min(most, _size(batch))))


def _chunk(plan: Plan, batch: Batch) -> int:
    """Return the samples in a chunk when all chunks have one size."""
    size = _size(batch)
    if not size or plan.chunk is None:
        return size
    first, last = equal_cuts(size, plan.chunk)[-1]
    return last - first


def _effects(
    root: CheckedRoot,
    forward: Forward,
    batch: Batch,
    *,
    weights: ShiftedWeights | None = None,
    lazy: bool = True,
) -> Effects:
    """Return the outputs of the root, the gradients of all of them, and the changes of its state.

    ``weights``: those that the model runs with. Without ``lazy``, outputs that are computed only
    when something uses them are left out. The random draws are the same each time.
    ``DistributedDataParallel`` runs inside ``no_sync``, so that no gradient is reduced.
    """
    args, kwargs = batch.call(batch.leaves)
    quiet = getattr(root.outer, "no_sync", nullcontext)
    with preserved(root.module) as start, torch.enable_grad(), quiet():
        leaves = torch.utils._pytree.tree_leaves(forward(*args, **kwargs))
        if not lazy and not all(isinstance(leaf, Deferred) for leaf in leaves):
            leaves = [leaf for leaf in leaves if not isinstance(leaf, Deferred)]
        values = [leaf.value() if isinstance(leaf, Deferred) else leaf for leaf in leaves]
        numbers = [value for value in values if is_number(value)]
        folded = [fold(value) for value in numbers]
        outputs = [value for value in numbers if value.requires_grad]
        cotangents = [
            torch.ones_like(leaf) if leaf.numel() == 1 else pattern(leaf, 0, 0).div_(leaf.numel())
            for leaf in outputs
        ]
        own = [p for p in root.module.parameters() if p.requires_grad]
        parameters = [*own, *gathered(root.module)]
        counts = bool(outputs)
        del leaves, values, numbers
        differentiate = digest if weights is None else weights.digest
        found = differentiate(outputs, cotangents, parameters) if counts else []
        if counts and not any(bool(each.any()) for each in found):
            raise Refused("the model's weights have no gradients to compare")
        del outputs, cotangents
        return Effects(folded, found, updates_since(start))


def _require_finite(plain: Effects, blamed: str | None) -> None:
    """Raise ``Refused`` if the effects without a plan cannot be compared with others."""
    if not math.isfinite(length(plain.gradients)):
        raise Refused(NOT_COMPARABLE, blamed)


@contextmanager
def autocast_noticed(root: CheckedRoot) -> Iterator[None]:
    """Record it if a part of the root runs under autocast, in a call without a plan."""

    def look(*_: object) -> None:
        root.proof.autocasts |= autocast_on()

    if root.facts is not None and root.facts.compiled:  # it would be compiled anew for the hook
        yield
        return
    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()
