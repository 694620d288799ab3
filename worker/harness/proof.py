"""Does a plan keep its promise on this model and batch? Measured on a few samples of it.

The root's outputs' gradients under the plan are compared with the plain root's: equal within the
order of sums for what claims to be exact, within the lower precision's rounding for the rest. How
a split batch is joined is proven apart (``probe``), whenever a new structure of arguments comes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from traceback import clear_frames
from typing import Any

import torch
from torch import nn

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies.base import AS_IS, Deferred, Fidelity, Forward, Strategy
from autofit.strategies.facts import Facts
from autofit.worker.harness.compiling import uncompiled
from autofit.worker.harness.digest import (
    Digest,
    digest,
    largest_factor,
    mean_difference,
    pattern,
)
from autofit.worker.harness.facts import casts_noticed, silenced, tf32_on
from autofit.worker.harness.hosted import saved_on_host
from autofit.worker.harness.joining import Batch, Layout, equal_cuts
from autofit.worker.harness.moved import Change, Held, moved_otherwise, since
from autofit.worker.harness.noise import (
    ORDER,
    Rounded,
    if_wide,
    nudged,
    to_bf16,
    weights_rounded,
)
from autofit.worker.harness.probe import (
    REENTRANT,
    SAMPLES,
    batched_leaves,
    few,
    pointing,
    preserved,
    tolerance,
)
from autofit.worker.harness.reachable_state import Key
from autofit.worker.harness.roots import HarnessRoot, Sensitivity
from autofit.worker.harness.sharded import gathered, is_sharded
from autofit.worker.oom import Kind, classify
from autofit.worker.traces import MOST, NOISE

Effects = tuple[Digest, dict[Key, Change | Held]]
"""A call's gradients, and what it changed of the state that it can reach."""

Saved = Callable[[], AbstractContextManager[object]]
"""Makes a context that says where what autograd saves is kept."""

Way = tuple[str, int, Saved]
"""A name, the samples at most, and where what autograd saves for them is kept."""

ROUNDING = 0.25
"""Relative difference of all gradients together that bf16 may make at random initialisation.

bf16 keeps 8 bits; through tens of layers a few per cent are usual, a strategy that loses a
gradient is off by far more. Under BatchNorm it may be more: see ``_sensitivity``.
"""

SIZE = 1.8
"""Times as large, or as small, that a parameter's gradient may be where its direction is chance.

Seen in bf16 of ResNets of 50 to 152 layers at random initialisation: 1.3, and of two classes 1.7.
"""

PLAN = "what of a plan shows in the gradients"
CHECKPOINTED = Plan.of({"checkpointing": "all"})
"""Proven, it stands for the plain model where that does not fit."""


def prove(
    root: HarnessRoot, plan: Plan, args: Any, kwargs: Any, facts: Facts, *, known: bool = False
) -> bool:
    """Apply ``plan`` to ``root`` and compare; raise ``Refused`` when the promise does not hold.

    ``known``: it does, as far as it depends on no size, nor on how noisy gradients are: that is
    found in each launch, of the weights it begins with. Returns whether it was proven.
    """
    root.difference = None
    shown = _shown(plan)
    noisy = _normalised(root) and shown.fidelity(facts) is Fidelity.ROUNDING
    known = known and not any(strategy.sized for strategy, _ in shown)
    known = known and (root.noise_sought or not noisy)
    if shown.neutral or shown.fidelity(facts) is Fidelity.RECIPE or known:
        root.apply(plan)
        return False
    root.proofs += 1
    if noisy:  # what was found of other weights may be less
        root.noise_sought, root.sensitivity = True, None
    for strategy, level in shown:
        args, kwargs = strategy.telling(level, args, kwargs)
    redraws = any(s.redraws or s.fidelity(level, facts) is Fidelity.REDRAW for s, level in shown)
    told = (s.name for s, _ in shown if type(s).telling is not Strategy.telling)
    attempt = partial(
        _prove_and_blame, root, plan, Batch.of(args, kwargs), facts, call=(redraws, *told)
    )
    with silenced(root.module) if redraws else nullcontext():
        if plan["compile"] == AS_IS and root.facts is not None and root.facts.compiled:
            _without_code(root, attempt, alone=facts.world_size == 1)
        else:
            attempt()
    return True


def _without_code(root: HarnessRoot, attempt: Callable[[], None], *, alone: bool) -> None:
    """Prove a plan without the code that the script has compiled, which is not for few samples.

    With it where memory has no room otherwise: fused, it may need much less. Others would not.
    """
    try:
        with uncompiled():
            attempt()
    except Exception as error:
        if not alone or classify(error).kind is not Kind.OOM:
            raise
        clear_frames(error.__traceback__)  # they hold what did not fit
        root.plainly.clear()
        attempt()


def remember(root: HarnessRoot, plan: Plan) -> None:
    """Take down that ``plan`` has kept its promise on ``root``, and what that has shown of it."""
    noise = root.sensitivity and [root.sensitivity.gradients, sorted(root.sensitivity.buffers)]
    root.known.put([root.casts, noise], PLAN, _shown(plan).changes)


def is_known(root: HarnessRoot, plan: Plan) -> bool:
    """Return whether ``plan`` has kept its promise on ``root``, here or in an earlier launch."""
    if (shown := root.known.get(PLAN, _shown(plan).changes)) is None:
        return False
    casts, noise = shown
    root.casts = root.casts or casts
    if noise is not None and root.sensitivity is None:
        root.sensitivity = Sensitivity(noise[0], frozenset(noise[1]))
    return True


def _prove(
    root: HarnessRoot, plan: Plan, batch: Batch, facts: Facts, *, call: tuple[object, ...]
) -> None:
    """Apply ``plan`` and compare; ``call``: how it differs from the script's own."""
    unsized = plan.unsized
    root.take_back()
    try:
        if _shown(unsized).neutral:
            root.apply(unsized)
        else:
            expected, found = _beside_plain(root, unsized, batch, call)
            if not _compare(root, unsized, facts, found, expected, batch):
                _prove_exact(root, unsized, batch, facts, call=call)
        if unsized == plan:
            return
        # Beside the rest of the plan, which has just been proven.
        some = _samples(batch, _chunk(plan, batch))
        expected = _applied(root, some)
        root.apply(plan)
        _compare(root, plan, facts, _gradients(root, root.forward, some), expected, batch)
    except RuntimeError as failure:
        if "use_reentrant" not in str(failure):
            raise
        root.take_back()
        raise Refused(REENTRANT) from None


def _prove_and_blame(
    root: HarnessRoot, plan: Plan, batch: Batch, facts: Facts, *, call: tuple[object, ...]
) -> None:
    """Do as ``_prove``; name the strategy that a refusal of several is due to, if it is one.

    It is the one that is refused by itself too, or that memory has no room to ask while the others
    hold; what rounds is asked first. Else it is how they work together, and none is named. Where
    ranks meet in a forward nothing is asked, as others may not refuse: it is the one that rounds.
    """
    try:
        _prove(root, plan, batch, facts, call=call)
        return
    except Refused as failure:
        shown = sorted(_shown(plan.unsized), key=lambda each: -each[0].fidelity(each[1], facts))
        if failure.strategy is not None or len(shown) < 2:
            raise
        refusal = Refused(str(failure))  # without frames that hold tensors
    rounding = [s.name for s, level in shown if s.fidelity(level, facts) is Fidelity.ROUNDING]
    if _communicates(root.module):
        raise Refused(str(refusal), rounding[0] if len(rounding) == 1 else None)
    unasked: list[str] = []
    for strategy, level in shown:
        try:
            _prove(root, Plan.of({strategy.name: level}), batch, facts, call=call)
        except Refused as alone:
            raise Refused(str(alone), strategy.name) from None
        except Exception as error:
            if classify(error).kind is not Kind.OOM:
                raise
            clear_frames(error.__traceback__)
            unasked.append(strategy.name)
    raise Refused(str(refusal), unasked[0] if len(unasked) == 1 else None)


def _communicates(module: nn.Module) -> bool:
    """Return whether the ranks are known to meet in a forward of ``module``."""
    shared = any(isinstance(each, nn.SyncBatchNorm) for each in module.modules())
    return shared or is_sharded(module)


def _prove_exact(
    root: HarnessRoot, plan: Plan, batch: Batch, facts: Facts, *, call: tuple[object, ...]
) -> None:
    """Prove what of ``plan`` does not round, by itself: beside the rest it has shown nothing."""
    facts = _as_cast(root, facts)
    levels = {s.name: v for s, v in plan if s.fidelity(v, facts) < Fidelity.ROUNDING}
    difference = root.difference
    _prove(root, Plan.of(levels), batch, facts, call=call)
    root.difference = difference
    root.apply(plan)


def _applied(root: HarnessRoot, batch: Batch) -> Effects:
    """Return what the samples do under the plan that is applied.

    Where they do not fit: with what autograd saves in host memory.
    """
    try:
        return _gradients(root, root.forward, batch)
    except Exception as error:
        if classify(error).kind is not Kind.OOM or is_sharded(root.module):
            raise
        clear_frames(error.__traceback__)
    with saved_on_host(root.module.parameters()):
        return _gradients(root, root.forward, batch)


def _beside_plain(
    root: HarnessRoot, plan: Plan, batch: Batch, call: tuple[object, ...]
) -> tuple[Effects, Effects]:
    """Apply ``plan``; return what a few samples do without it and under it.

    All of them, where the model cannot run on a few: the nodes of a graph, or a batch whose state
    from the call before is as large as all of it.
    """
    ways = _ways(root)
    if not (_size(batch) and pointing(batch, _layout(batch))):
        try:
            return _first_that_fits(root, plan, batch, call, ways)
        except _Indivisible:
            pass
    size = _size(batch)
    every = dict.fromkeys((name, size, saved) for name, _, saved in ways)
    return _first_that_fits(root, plan, batch, call, [*every])


def _first_that_fits(
    root: HarnessRoot, plan: Plan, batch: Batch, call: tuple[object, ...], ways: list[Way]
) -> tuple[Effects, Effects]:
    """Apply ``plan``; return both in the first of ``ways`` that memory has room for."""
    error: Exception | None = None
    for name, most, saved in ways:
        found, error = _try_beside_plain(root, plan, batch, most, saved, (name, most, *call))
        if found is not None:
            return found
        assert error is not None, "it is one or the other"
        clear_frames(error.__traceback__)
        root.take_back()
    assert error is not None
    raise error


class _Indivisible(Exception):
    """The model runs on all samples of a call, or on none."""


def _ways(root: HarnessRoot) -> list[Way]:
    """Return how samples may run without a plan, each where the ones before it do not fit.

    A few; one; one whose blocks run again in backward, once that is proven of them; else what
    autograd saves for it waits in host memory. Of a sharded model only what is sure to fit: where
    memory runs out in the middle of it, its ranks do not come together again.
    """
    fewest = 2 if _normalised(root) else 1
    few: Way = ("plain", _few(root), nullcontext)
    on_host: Way = ("on the host", fewest, partial(saved_on_host, [*root.module.parameters()]))
    if is_sharded(root.module):
        return [few if root.whole_fits else on_host]
    ways: list[Way] = [few, ("plain", fewest, nullcontext), on_host]
    if root.leanly is not None and is_known(root, CHECKPOINTED):
        ways.insert(2, ("leanly", fewest, root.leanly))
    return ways


def _try_beside_plain(
    root: HarnessRoot,
    plan: Plan,
    batch: Batch,
    most: int,
    saved: Saved,
    key: tuple[object, ...],
) -> tuple[tuple[Effects, Effects] | None, Exception | None]:
    """Return both, or the error where memory ran out.

    ``key``: of what the samples do without the plan; plan after plan may be proven in one call.
    Raises ``_Indivisible`` where fewer samples than there are do not run without the plan either.
    """
    sharded = is_sharded(root.module)
    samples = _samples(batch, most)
    try:
        if key not in root.plainly:
            try:
                with saved(), casts_noticed(root):
                    root.plainly[key] = _gradients(root, root.plain, samples)
            except RuntimeError as error:
                if most >= _size(batch) or sharded or classify(error).kind is not Kind.NOT_OOM:
                    raise
                raise _Indivisible from error
        root.apply(plan)
        if sharded or saved is nullcontext:
            with saved():
                return (root.plainly[key], _gradients(root, root.forward, samples)), None
        return (root.plainly[key], _applied(root, samples)), None
    except Exception as error:
        if classify(error).kind is not Kind.OOM or sharded:
            raise
        return None, error


def _few(root: HarnessRoot) -> int:
    """Return the samples that tell enough: statistics of very few are noise themselves."""
    return 4 * SAMPLES if _normalised(root) else SAMPLES


def _normalised(root: HarnessRoot) -> bool:
    """Return whether statistics of the batch are taken, which amplify rounding."""
    return root.facts is not None and root.facts.batch_norm


def _compare(
    root: HarnessRoot,
    applied: Plan,
    facts: Facts,
    under: Effects,
    expected: Effects,
    batch: Batch,
) -> bool:
    """Raise ``Refused`` unless gradients and model change as closely as ``applied`` allows.

    ``batch``: the call it is shown on. Returns whether the gradients' direction was compared: where
    rounding makes another one of it, whatever rounds, only their sizes tell. ``False`` on all ranks
    alike where it may be so on one.
    """
    plan = _shown(applied)
    names = [s.name for s, _ in plan if s.sized] or [s.name for s, _ in plan]
    blamed = names[0] if len(names) == 1 else None
    (found, moved), (gradients, once) = under, expected
    dtypes = (p.dtype for p in root.module.parameters() if p.is_floating_point())
    exact = tolerance(dtypes, casts=root.casts)
    facts = _as_cast(root, facts)
    rounding = plan.fidelity(facts) is Fidelity.ROUNDING
    allowed = max(ROUNDING, exact) if rounding else exact
    error = root.difference = mean_difference(found, gradients)
    otherwise = moved_otherwise(moved, once, exact=None if rounding else exact)
    alone = facts.world_size == 1
    doubtful = error > ROUNDING / 2 or bool(otherwise)
    if not alone:  # others may see no reason to look: none does where the model communicates
        doubtful = _normalised(root) and not _communicates(root.module)
    if rounding and doubtful and root.sensitivity is None:
        root.sensitivity = _sensitivity(root, applied, batch, to_bf16)
    most, noise = MOST, root.sensitivity if rounding else None
    if not rounding and alone:
        most = MOST if tf32_on(root.module) else ORDER
        if allowed < error < most:
            noise = _sensitivity(root, applied, batch, nudged)
    chaos = rounding and noise is not None and NOISE * noise.gradients > MOST
    if noise is not None:
        allowed = max(allowed, min(NOISE * noise.gradients, most))
        far = moved_otherwise(moved, once, None if chaos else MOST)
        otherwise = far if chaos else [n for n in otherwise if n in far or n not in noise.buffers]
    if otherwise and not rounding and alone:  # a time that was taken is another one every time
        again = _sensitivity(root, applied, batch, _as_it_is, exact)
        unsteady = again.buffers if again is not None else frozenset()
        otherwise = [name for name in otherwise if name not in unsteady]
    if otherwise:
        raise Refused(f"the model's {otherwise[0]} would not change as it does", blamed)
    if error <= allowed:
        return alone or not (rounding and doubtful)
    figures = f"by {error:.1e}, {allowed:.1e} allowed"
    if chaos:
        factor = largest_factor(found, gradients)
        if factor <= SIZE:
            return False
        figures = f"in size, {factor:.2g} times, {SIZE} allowed"
    raise Refused(f"the gradients differ from the plain model's {figures}", blamed)


def _as_cast(root: HarnessRoot, facts: Facts) -> Facts:
    """Return ``facts`` of a script that enters autocast if the root does."""
    return replace(facts, autocast=facts.autocast or root.casts)


def _sensitivity(
    root: HarnessRoot, plan: Plan, batch: Batch, rounded: Rounded, exact: float | None = None
) -> Sensitivity | None:
    """Return what rounding does to the model, once and before all else.

    Of weights and inputs; the computation stays the script's own. What a model does to so small a
    difference it does to that of any lower precision, or of another order of sums: BatchNorm at
    random initialisation makes tens of per cent of bf16's, and with ReLU half a per cent of
    float32's own. ``None`` where no sample fits.
    """
    root.take_back()
    size, ways = _size(batch), [(most, saved) for _, most, saved in _ways(root)]
    try:
        for most, saved in [*ways, *((size, saved) for _, saved in ways)]:
            try:
                with saved():
                    return _rounded_once(root, _samples(batch, most), rounded, exact)
            except Exception as error:  # too few for the model, as they may be, or too many
                if classify(error).kind is not Kind.OOM and most >= size:
                    raise
                clear_frames(error.__traceback__)
        return None
    finally:
        root.apply(plan)


def _as_it_is(values: torch.Tensor) -> torch.Tensor:
    return values


def _rounded_once(
    root: HarnessRoot, samples: Batch, rounded: Rounded, exact: float | None
) -> Sensitivity:
    """Return what the plain root makes of the samples once all is ``rounded``.

    ``exact``: the relative difference in its state that is none.
    """
    plain, once = _gradients(root, root.plain, samples)
    with weights_rounded(root.module.parameters(), rounded):
        leaves = [if_wide(leaf, rounded) for leaf in samples.leaves]
        found, moved = _gradients(root, root.plain, Batch(leaves, samples.spec))
    buffers = frozenset(moved_otherwise(moved, once, exact=exact))
    return Sensitivity(mean_difference(found, plain), buffers)


def _shown(plan: Plan) -> Plan:
    return plan.in_calls


def _layout(batch: Batch) -> Layout:
    return Layout(0, batched_leaves(batch, 0), ())


def _size(batch: Batch) -> int:
    """Return the samples in a call; none where no argument shows them."""
    layout = _layout(batch)
    return layout.size(batch) if layout.batched else 0


def _samples(batch: Batch, most: int) -> Batch:
    """Return a copy of the first samples: the model may change its arguments."""
    return few(batch, _layout(batch), range(min(most, _size(batch))))


def _chunk(plan: Plan, batch: Batch) -> int:
    """Return the samples that will run at a time, all of one size."""
    size = _size(batch)
    if not size or plan["micro_batch"] == AS_IS:
        return size
    first, last = equal_cuts(size, int(plan["micro_batch"]))[-1]
    return last - first


def _gradients(root: HarnessRoot, forward: Forward, batch: Batch) -> Effects:
    """Return the gradients of all that the root returns, and what that moved in it.

    The random draws are the same each time.

    Under ``DistributedDataParallel`` inside ``no_sync``: nothing is reduced, no hook is armed.
    """
    args, kwargs = batch.call(batch.leaves)
    quiet = getattr(root.outer, "no_sync", nullcontext)
    with preserved(root.module) as start, torch.enable_grad(), quiet():
        leaves = torch.utils._pytree.tree_leaves(forward(*args, **kwargs))
        values = [leaf.value() if isinstance(leaf, Deferred) else leaf for leaf in leaves]
        outputs = [
            value for value in values if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        cotangents = [
            torch.ones_like(leaf) if leaf.numel() == 1 else pattern(leaf, 0, 0).div_(leaf.numel())
            for leaf in outputs
        ]
        own = [p for p in root.module.parameters() if p.requires_grad]
        parameters = [*own, *gathered(root.module)]
        found = digest(outputs, cotangents, parameters) if outputs else []
        if outputs and not any(bool(each.any()) for each in found):
            raise Refused("no gradient of its weights is there to be compared")
        del leaves, values, outputs, cotangents
        return found, since(start)
