"""Gradients are summed up without a trace, and under the same fixed draws as the forward."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from autofit.worker.harness.verification.fixed_draws import fixed_draws
from autofit.worker.harness.verification.gradient_digest import (
    BUCKETS,
    Digest,
    coefficients,
    differences,
    digest,
    fold,
    largest_factor,
)

pytestmark = pytest.mark.quick


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 1))


def test_what_checkpointing_recomputes_draws_nothing_either(model: nn.Sequential) -> None:
    batch, parameters = torch.randn(4, 8), list(model.parameters())
    with fixed_draws(model):
        plain = model(batch).sum()
        again = checkpoint(model, batch, use_reentrant=False).sum()
        one = torch.ones_like(plain)
        expected = digest([plain], [one], parameters)
        found = digest([again], [one], parameters)
    assert max(differences([found], expected)) < 1e-6


def test_nothing_arrives_in_grad(model: nn.Sequential) -> None:
    heard: list[torch.Tensor] = []
    parameters = [*model.parameters(), nn.Parameter(torch.zeros(3))]
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(heard.append)
    loss = model(torch.randn(4, 8)).sum()
    found = digest([loss], [torch.ones_like(loss)], parameters)
    assert not heard
    assert all(parameter.grad is None for parameter in parameters)
    assert not found[-1].any(), "an unused parameter has no gradient"


def test_outputs_are_freed_before_the_gradients_come(model: nn.Sequential) -> None:
    there: list[bool] = []
    logits = model(torch.randn(4, 8)).expand(4, 16).clone()
    output = StorageWeakRef(logits.untyped_storage())
    outputs, one = [logits], torch.ones_like(logits)
    del logits
    next(model.parameters()).register_hook(lambda _: there.append(not output.expired()))
    digest(outputs, [one], list(model.parameters()))
    assert (there, outputs) == ([False], [])


@pytest.mark.parametrize("shape", [(1024, 4096), (4096, 1024), (2048, 512), (768, 3072)], ids=str)
@pytest.mark.parametrize("dim", [0, 1], ids=["outputs", "inputs"])
def test_a_gradient_that_adds_up_to_zero_along_a_dimension_is_seen(
    shape: tuple[int, int], dim: int
) -> None:
    """As that of a layer before a LayerNorm does over its outputs: its digest is as large."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    gradient -= gradient.mean(dim, keepdim=True)
    assert float(fold(gradient).norm() / gradient.norm()) == pytest.approx(1.0, abs=0.05)


def sums(*parameters: tuple[float, int]) -> Digest:
    """Of gradients with that norm, and so many entries."""
    return [
        torch.full((entries,), norm / entries**0.5, dtype=torch.float64)
        for norm, entries in parameters
    ]


@pytest.mark.parametrize(
    ("found", "expected", "factor"),
    [
        (sums((1.0, BUCKETS), (1.0, 8)), sums((1.0, BUCKETS), (1.0, 8)), 1.0),
        (sums((1.5, BUCKETS), (1.0, 100)), sums((1.0, BUCKETS), (1.0, 100)), 1.5),
        (sums((1.0, BUCKETS), (0.5, 100)), sums((1.0, BUCKETS), (1.0, 100)), 2.0),
        (sums((10.0, BUCKETS), (3.0, 8)), sums((10.0, BUCKETS), (1.0, 8)), 1.04),
        (sums((1.0, BUCKETS), (0.0, 8)), sums((1.0, BUCKETS), (1.0, 8)), float("inf")),
        (sums((1.0, BUCKETS), (0.0, 8)), sums((1.0, BUCKETS), (1e-3, 8)), 1.0),
        (sums((1.0, BUCKETS), (1.0, 8)), sums((1.0, BUCKETS), (float("nan"), 8)), float("inf")),
        (sums((1.0, BUCKETS), (float("nan"), 8)), sums((1.0, BUCKETS), (1.0, 8)), float("inf")),
    ],
)
def test_how_far_sizes_are_apart(found: Digest, expected: Digest, factor: float) -> None:
    """Of a few entries only whether they are lost; of next to nothing, not that."""
    assert largest_factor(found, expected) == pytest.approx(factor, rel=0.01)


@pytest.mark.parametrize(
    ("factors", "shares"), [((1.0, 1.0), (1.0, 1.0)), ((1.0, 0.5), (1.0, 2.0)), ((1.0, 0.0), None)]
)
def test_how_often_each_part_counts(
    factors: tuple[float, float], shares: tuple[float, float] | None
) -> None:
    torch.manual_seed(0)
    parts = [[torch.randn(100).double(), torch.randn(1).double()] for _ in range(2)]
    whole = [a + b for a, b in zip(*parts, strict=True)]
    pieces = [[f * v for v in part] for f, part in zip(factors, parts, strict=True)]
    found, _, rest = coefficients(pieces, whole)
    if shares is None:
        assert rest > 0.1
    else:
        assert rest < 1e-12
        assert found == pytest.approx(shares)


def test_parts_that_are_alike_count_once_each() -> None:
    part = [torch.randn(100).double()]
    found, _, rest = coefficients([part, part], [2.0 * part[0]])
    assert found == pytest.approx([1.0, 1.0])
    assert rest < 1e-12
