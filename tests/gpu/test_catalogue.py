"""What optimizer levels do on a GPU and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from autofit.plan import Plan
from tests.strategies.optimizers import Under, owned

pytestmark = pytest.mark.gpu

WIDTH = 1024
"""Of a layer: 4 MiB of weights."""

EIGHT_BIT = Plan.of({"optimizer": "eight_bit"})


@pytest.fixture
def under() -> Iterator[Under]:
    """Every optimizer steps under its ``plan``."""
    with owned() as owner:
        yield owner


def model(width: int = WIDTH, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(5)
    layers = nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)
    return nn.Sequential(*layers).to("cuda", dtype)


def train(net: nn.Module, optimizer: Optimizer, start: int = 0, steps: int = 10) -> None:
    parameter = next(net.parameters())
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, parameter.shape[1], generator=generator).to(parameter)
        optimizer.zero_grad()
        (net(x) - x).square().mean().backward()
        optimizer.step()


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().float() for p in net.parameters()])


@pytest.mark.parametrize("stream", [False, True], ids=["default stream", "another stream"])
def test_eight_bits_on_another_stream(under: Under, stream: bool) -> None:
    """The kernels run on CUDA's default stream, whatever the script's own is."""
    plain, eight = model(), model()
    train(plain, AdamW(plain.parameters(), lr=1e-3), steps=1)
    under.plan = EIGHT_BIT
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if stream else None):
        train(eight, AdamW(eight.parameters(), lr=1e-3), steps=1)
    torch.cuda.synchronize()
    assert torch.allclose(weights(eight), weights(plain), atol=1e-6)


@pytest.mark.parametrize("kind", ["RMSprop", "NAdam"])
def test_one_at_a_time_needs_less(under: Under, kind: str) -> None:
    """Than torch's own choice on CUDA, which takes all parameters at once."""
    make: Any = getattr(torch.optim, kind)
    peaks = {}
    for level in ("as_is", "single"):
        under.plan = Plan.of({"optimizer": level})
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12))).to("cuda")
        optimizer = make(net.parameters(), lr=1e-3)
        train(net, optimizer, steps=2)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        peaks[level] = torch.cuda.max_memory_allocated() - before
        size = sum(p.nbytes for p in net.parameters())
        del optimizer, net
    assert peaks["as_is"] >= size
    assert peaks["single"] < 0.4 * size
