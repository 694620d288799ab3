"""What the first call of a root tells of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autofit.facts import RootFacts
from autofit.worker.harness.batch.layout import Batch, Cut, Layout
from autofit.worker.harness.session import script_facts
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.torch_state.compile_state import uncompiled
from autofit.worker.harness.torch_state.guarded import beside
from autofit.worker.harness.torch_state.hf_cache import without_cache
from autofit.worker.harness.torch_state.pytree import flatten
from autofit.worker.harness.torch_state.rng import RandomState
from autofit.worker.harness.verification.fixed_draws import FixedDraws, without_dropout
from autofit.worker.harness.verification.split_check import batched_arguments, preserved
from autofit.worker.meter import Meter
from autofit.worker.oom.attempt import attempt_model

CLOSE, CLOSE_IN_HALF = 1e-3, 2e-2
"""Relative difference up to which the outputs of samples alone and together are equal."""


def with_samples(
    root: HarnessRoot, facts: RootFacts, args: Any, kwargs: Any, meter: Meter
) -> RootFacts:
    """Return ``facts`` with the samples of a root's first call.

    The batch is the first dimension of the arguments as a rule. Where that may be time, a few
    forwards without gradients tell: samples do not depend on one another, points in time do.
    """
    kwargs = without_cache(root.module, kwargs)
    lost = "how many samples a call of the model has cannot be told"
    batch = beside(lambda: Batch.of(args, kwargs), None, lost)
    if batch is None or not script_facts.batch_dimension_uncertain(facts, batch):
        return facts
    for dim in (0, 1):
        batched = batched_arguments(batch, dim)
        layout = Layout(dim, batched, ())
        if not batched or not layout.fits(batch) or layout.size(batch) < 2:
            continue
        if _apart(root, batch, layout):
            root.batch_dim = dim
            return replace(facts, batch=layout.size(batch))
    return replace(facts, batch_doubted=True)


def _apart(root: HarnessRoot, batch: Batch, layout: Layout) -> bool:
    """Return whether two samples along a dimension give the same outputs alone and together."""
    before, draws = RandomState.now(), FixedDraws()

    def outputs(cut: Cut) -> list[torch.Tensor]:
        before.restore()
        draws.cut = cut
        args, kwargs = batch.call(layout.select(batch, cut))
        with draws:
            leaves = flatten(root.plain(*args, **kwargs))[0]
        return [each for each in leaves if _is_number(each)]

    def compared() -> bool:
        return _equal(outputs((0, 2)), outputs((0, 1)), outputs((1, 2)), layout.dim)

    try:
        with uncompiled(), preserved(root.module), without_dropout(root.module), torch.no_grad():
            return attempt_model(compared).value or False
    finally:
        before.restore()


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _equal(
    together: Sequence[torch.Tensor],
    first: Sequence[torch.Tensor],
    second: Sequence[torch.Tensor],
    dim: int,
) -> bool:
    """Compare outputs: rows are put together, a single number is the mean of the two."""
    if not together or not len(together) == len(first) == len(second):
        return False
    for whole, one, other in zip(together, first, second, strict=True):
        if one.shape != other.shape:
            return False
        if whole.shape == one.shape:
            expected = (one + other) / 2
        else:
            along = [axis for axis in range(one.ndim) if whole.shape[axis] == 2 * one.shape[axis]]
            if not along:
                return False
            expected = torch.cat((one, other), dim if dim in along else along[0])
        close = CLOSE if whole.element_size() > 2 else CLOSE_IN_HALF
        if float((whole - expected).norm()) > close * float(whole.norm()):
            return False
    return True
