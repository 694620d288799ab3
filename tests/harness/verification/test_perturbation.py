"""Weights that a check changes are afterwards what they were, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autofit.worker.harness.verification.perturbation import at_other_weights

pytestmark = pytest.mark.quick


def bits(module: nn.Module) -> list[bytes]:
    return [p.detach().view(torch.uint8).numpy().tobytes() for p in module.parameters()]


@pytest.mark.parametrize("larger", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_other_weights_are_put_back(dtype: torch.dtype, larger: bool) -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(16, 16), nn.LayerNorm(16)).to(dtype)
    limits = torch.finfo(dtype)
    odd = [limits.max, limits.min, limits.tiny / 4, -0.0, torch.inf, torch.nan]
    extreme = nn.Parameter(torch.tensor(odd, dtype=dtype).view(2, 3))
    small = nn.Parameter(torch.tensor([[limits.tiny / 4, -0.0], [0.0, 3.0]], dtype=dtype))
    module.extend([nn.ParameterList([extreme, small])])
    before = bits(module)
    with at_other_weights(module, larger=larger):
        assert all(a != b for a, b in zip(bits(module), before, strict=True))
    assert bits(module) == before


def test_other_weights_are_put_back_after_an_error() -> None:
    module = nn.Linear(8, 8)
    before = bits(module)
    with pytest.raises(RuntimeError, match="shortage"), at_other_weights(module):
        raise RuntimeError("shortage")
    assert bits(module) == before
