"""What the first call of a root tells of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autofit.facts import RootFacts
from autofit.worker.harness.batch.layout import Batch, Layout
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.torch_state.compile_state import uncompiled
from autofit.worker.harness.torch_state.guarded import beside
from autofit.worker.harness.torch_state.modules import without_cache
from autofit.worker.harness.torch_state.pytree import flatten
from autofit.worker.harness.torch_state.rng import RandomState
from autofit.worker.harness.verification.fixed_draws import FixedDraws, without_dropout
from autofit.worker.harness.verification.split_check import (
    batch_dimension_uncertain,
    batched_arguments,
    preserved,
)
from autofit.worker.meter import Meter
from autofit.worker.oom.attempt import attempt_model

CLOSE, CLOSE_IN_HALF = 1e-3, 2e-2
"""Relative difference up to which the outputs of samples alone and together are equal."""
MOST = 3
"""Samples that are run alone and together."""


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
    if batch is None or not batch_dimension_uncertain(facts, batch):
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
    """Return whether samples along a dimension give the same outputs alone and together."""
    before, draws = RandomState.now(), FixedDraws()
    samples = min(MOST, layout.size(batch))

    def outputs(first: int, last: int) -> list[torch.Tensor]:
        before.restore()
        draws.cut = (first, last)
        args, kwargs = batch.call(layout.select(batch, draws.cut))
        with draws:
            leaves = flatten(root.plain(*args, **kwargs))[0]
        return [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]

    def compared() -> bool:
        alone = [outputs(each, each + 1) for each in range(samples)]
        pairs = [outputs(each, each + 2) for each in range(samples - 1)]
        together = outputs(0, samples)
        if not together or any(len(each) != len(together) for each in (*alone, *pairs)):
            return False
        return all(
            _rows_agree(whole, one, layout.dim)
            if whole.shape != one[0].shape
            else _averages_agree(float(whole.sum()), _sums(one), _sums(two), _tolerance(whole))
            for whole, one, two in zip(
                together, zip(*alone, strict=True), zip(*pairs, strict=True), strict=True
            )
        )

    try:
        with uncompiled(), preserved(root.module), without_dropout(root.module), torch.no_grad():
            return attempt_model(compared).value or False
    finally:
        before.restore()


def _tolerance(output: torch.Tensor) -> float:
    return CLOSE if output.element_size() > 2 else CLOSE_IN_HALF


def _sums(outputs: Sequence[torch.Tensor]) -> list[float]:
    return [float(each.sum()) for each in outputs]


def _rows_agree(together: torch.Tensor, alone: Sequence[torch.Tensor], dim: int) -> bool:
    """Return whether the outputs of samples alone, put together, are that of all."""
    shape = alone[0].shape
    along = [axis for axis in range(len(shape)) if together.shape[axis] == len(alone) * shape[axis]]
    if not along or any(each.shape != shape for each in alone):
        return False
    expected = torch.cat([*alone], dim if dim in along else along[0])
    return float((together - expected).norm()) <= _tolerance(together) * float(together.norm())


def _averages_agree(
    together: float, alone: Sequence[float], pairs: Sequence[float], tolerance: float
) -> bool:
    """Return whether numbers of one, two, and all samples are means with the same weights.

    A loss weighs a sample by its labels. Each pair tells the weight of its second sample.
    """
    near = tolerance * abs(together)
    if max(alone) - min(alone) <= near:
        return all(abs(together - each) <= near for each in (*alone, *pairs))
    weights = [1.0]
    for first, second, pair in zip(alone, alone[1:], pairs, strict=False):
        if not min(first, second) < pair < max(first, second):
            return False
        weights.append(weights[-1] * (pair - first) / (second - pair))
    mean = sum(weight * each for weight, each in zip(weights, alone, strict=True)) / sum(weights)
    return abs(together - mean) <= near
