"""What strategies do on a card and nowhere else: managed memory, and what NVML makes of it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies.optimizer import managed
from autofit.strategies.optimizer.fused import ADAGRAD_ON_CUDA
from autofit.worker.meter.cuda import CudaMeter
from tests.strategies.optimizers import Under, owned, same

pytestmark = pytest.mark.gpu

MIB = 1 << 20
WIDTH = 1024
"""Two layers of 4 MiB each, above what stays in memory of torch's, and biases below."""

FUSED, PAGED = Plan.of({"optimizer": "fused"}), Plan.of({"optimizer": "paged"})
EIGHT_BIT = Plan.of({"optimizer": "eight_bit"})
PAGED_EIGHT_BIT = Plan.of({"optimizer": "paged_eight_bit"})

Make = Callable[[nn.Module], Optimizer]


@pytest.fixture
def under() -> Iterator[Under]:
    """Every optimizer steps under its ``plan``; nothing managed is left behind."""
    with owned() as owner:
        yield owner
    gc.collect()
    assert managed.held() == 0


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


OPTIMIZERS: dict[str, Make] = {
    "adam": lambda net: Adam(net.parameters(), lr=1e-3, weight_decay=0.1),
    "adamw": lambda net: AdamW(net.parameters(), lr=1e-3, amsgrad=True),
    "sgd": lambda net: SGD(net.parameters(), lr=0.05, momentum=0.9),
}
if ADAGRAD_ON_CUDA:
    OPTIMIZERS["adagrad"] = lambda net: Adagrad(net.parameters(), lr=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_paged_state_is_the_same_training(under: Under, kind: str, dtype: torch.dtype) -> None:
    """To the bit: it is the same kernels on the same numbers."""
    plain, paged = model(dtype=dtype), model(dtype=dtype)
    under.plan = FUSED
    expected = OPTIMIZERS[kind](plain)
    train(plain, expected)
    under.plan = PAGED
    optimizer = OPTIMIZERS[kind](paged)
    train(paged, optimizer, steps=5)
    large = [p for p in paged.parameters() if p.numel() >= managed.LARGE]
    assert len(large) == 2
    assert managed.held() == sum(size_of(optimizer, parameter) for parameter in large)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(checkpoint)  # into memory of torch's, from where it moves again
    train(paged, optimizer, start=5, steps=3)
    assert managed.held() == sum(size_of(optimizer, parameter) for parameter in large)
    under.plan = FUSED
    train(paged, optimizer, start=8, steps=2)
    gc.collect()
    assert managed.held() == 0, "taken back"
    assert torch.equal(weights(paged), weights(plain))
    assert same(optimizer.state_dict(), expected.state_dict(), 0.0)


def size_of(optimizer: Optimizer, parameter: torch.Tensor) -> int:
    """Return the bytes of a parameter's state that have its shape."""
    moments = [v for v in optimizer.state[parameter].values() if v.shape == parameter.shape]
    assert moments
    return sum(moment.nbytes for moment in moments)


def test_paged_codes_are_the_same_training(under: Under) -> None:
    plain, paged = model(), model()
    under.plan = EIGHT_BIT
    expected = AdamW(plain.parameters(), lr=1e-3)
    train(plain, expected)
    under.plan = PAGED_EIGHT_BIT
    optimizer = AdamW(paged.parameters(), lr=1e-3)
    train(paged, optimizer)
    assert managed.held() == 2 * 2 * WIDTH**2, "two codes for each of two layers' weights"
    assert torch.equal(weights(paged), weights(plain))
    assert same(optimizer.state_dict(), expected.state_dict(), 0.0)


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


def test_the_meter_counts_managed_memory(under: Under) -> None:
    """It is on the device, and outside torch's allocator."""
    gc.collect()
    torch.cuda.empty_cache()
    gauge = CudaMeter()
    gauge.arm()
    net = model(8192)  # 512 MiB of weights, 1 GiB of state
    optimizer: Any = AdamW(net.parameters(), lr=1e-3)
    under.plan = PAGED
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    gauge.reset()
    before, held = gauge.context, torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    gauge.sample()
    state = 2 * 2 * 4 * 8192**2
    assert managed.held() == state
    assert torch.cuda.memory_allocated() - held < 2 * MIB
    assert state - 32 * MIB < gauge.context - before < state + 128 * MIB  # the process has others
    assert gauge.peak().device >= torch.cuda.max_memory_reserved() + state
    del optimizer
    gc.collect()
    gauge.reset()
    assert gauge.context - before < 128 * MIB, "given back"


def test_what_would_not_fit_is_never_asked_for(under: Under) -> None:
    """More managed memory than the card has free can hang it."""
    net = model(8192)
    optimizer = AdamW(net.parameters(), lr=1e-3)
    under.plan = PAGED
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    full = torch.empty(free - 600 * MIB, dtype=torch.uint8, device="cuda")
    before = weights(net).sum()
    with pytest.raises(Refused, match=r"takes 1\.0 GiB of managed memory, the card has"):
        optimizer.step()
    assert weights(net).sum() == before
    assert managed.held() == 0
    del full
    torch.cuda.empty_cache()


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
