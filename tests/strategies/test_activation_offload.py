"""Activation offloading: what travels, what stays, and that the gradients know nothing of it.

A CPU stands in for the device: what travels goes to memory of Python's own.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autofit import host
from autofit.exceptions import Refused
from autofit.strategies import Hardware, get
from autofit.strategies.activation_offload import saved_tensors
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.meter import build
from tests.roots import Rooted
from tests.strategies.contract import MEASURE, meter_environment

quick, full = pytest.mark.quick, pytest.mark.full


class Block(nn.Module):
    """Three products of one input under one mask, and a layer that drops."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) * mask
        x = x + scores.softmax(-1) @ self.v(x)
        after: torch.Tensor = x + self.mlp(x)
        return after


class Net(nn.Module):
    """Some of them, under a mask that is made anew."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.register_buffer("scale", torch.full((8,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril() * 0.5
        x = x * self.get_buffer("scale")
        for block in self.blocks:
            x = block(x, mask)
        return x


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small tensors travel."""
    monkeypatch.setattr(saved_tensors, "SMALL", 1)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What has left the device."""
    found: list[torch.Tensor] = []
    plain = saved_tensors._BlockingTransfer.to_host

    def to_host(
        transfer: saved_tensors._BlockingTransfer, source: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        found.append(source)
        return plain(transfer, source)

    monkeypatch.setattr(saved_tensors._BlockingTransfer, "to_host", to_host)
    return found


def gradients(module: nn.Module, call: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(7)
    module.zero_grad()
    call(x).square().mean().backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def call_of(held: HarnessRoot) -> Callable[..., Any]:
    return lambda *args: held.running(*args)


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@quick
@pytest.mark.parametrize("level", ["half", "all"])
def test_training_is_the_same_to_the_last_bit(level: str, rooted: Rooted) -> None:
    def trained(level: str) -> list[torch.Tensor]:
        torch.manual_seed(5)
        module = Net()
        held = rooted(module, activation_offload=level)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(4):
            optimizer.zero_grad()
            held.running(torch.randn(3, 6, 8)).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in module.parameters()]

    assert same(trained(level), trained("as_is"))


@quick
def test_what_travels_and_what_stays(rooted: Rooted, sent: list[torch.Tensor]) -> None:
    module, x = Net(), torch.randn(3, 6, 8)
    held = rooted(module, activation_offload="all")
    output = held.running(x)
    stay = {t.data_ptr() for t in (x, *module.parameters(), *module.buffers())}
    went = [source.data_ptr() for source in sent]
    assert not stay & {*went}
    assert len(went) == len({*went}), "what several operations save travels once"
    assert [t.numel() for t in sent].count(36) == 1, "the mask of all blocks"
    everything = sum(t.nbytes for t in sent)
    del output
    sent.clear()
    held.take_back()
    rooted(module, activation_offload="half").running(x)
    assert 0.3 * everything < sum(t.nbytes for t in sent) <= 0.5 * everything
    sent.clear()
    with torch.no_grad():
        held.running(x)
    assert not sent


@quick
def test_beside_checkpointing_the_inputs_of_blocks_travel(
    rooted: Rooted, sent: list[torch.Tensor]
) -> None:
    module, x = Net(), torch.randn(3, 6, 8)
    expected = gradients(module, module, x)
    held = rooted(module, activation_offload="all", checkpointing="all")
    assert same(gradients(module, call_of(held), x), expected)
    assert len(sent) == len(module.blocks) + 1  # and the mask


@quick
def test_a_graph_that_is_used_again(rooted: Rooted) -> None:
    """Backward twice through it, and through its own backward."""
    module, x = Net(), torch.randn(3, 6, 8, requires_grad=True)

    def both(call: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(7)
        module.zero_grad()
        output = call(x).square().mean()
        output.backward(retain_graph=True)
        output.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(output, x, create_graph=True)
        slope.square().sum().backward()
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]

    held = rooted(module, activation_offload="all")
    assert same(both(call_of(held)), both(module))


class Odd(nn.Module):
    """Tensors that overlap, have gaps, and change once their first graph is of no more use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        gaps, overlapping = x[:, ::2] * 1.0, x.mean(1, keepdim=True).expand(-1, 3)
        y = gaps.t() * overlapping.t() + x[:, 1::2].t()
        z = y.detach()
        y.sin()  # saves it, and comes to nothing
        z.mul_(2)
        result: torch.Tensor = (
            torch.view_as_real(torch.complex(y, y).conj() ** 2) + y.cos()[..., None]
        )
        return result


@quick
def test_odd_tensors(rooted: Rooted) -> None:
    module, x = Odd(), torch.randn(4, 6)
    expected = gradients(module, module, x)
    held = rooted(module, activation_offload="all")
    assert same(gradients(module, call_of(held), x), expected)


@quick
def test_no_more_than_the_host_has_room_for(
    rooted: Rooted, sent: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = Net(), torch.randn(3, 6, 8)
    expected = gradients(module, module, x)
    total = host.hardware().total_bytes
    monkeypatch.setattr(host, "free_bytes", lambda: total // saved_tensors.RESERVE + 4096)
    held = rooted(module, activation_offload="all")
    assert same(gradients(module, call_of(held), x), expected)
    rounded = [1 << (t.nbytes - 1).bit_length() for t in sent]
    assert 2048 < sum(rounded) <= 4096
    unknown = Hardware(device="cpu", name="CPU", total_bytes=0)
    monkeypatch.setattr(host, "hardware", lambda: unknown)
    with pytest.raises(Refused, match="the free memory of the host is unknown"):
        rooted(module, activation_offload="all")


@quick
def test_what_no_backward_has_asked_for_is_given_back() -> None:
    module, x = Net(), torch.randn(3, 6, 8)
    offload = saved_tensors.Offload(module, 1.0)
    call = offload.around(module)
    output = call(x)
    assert offload.host_budget._held > 0
    del output
    gc.collect()
    assert offload.host_budget._held == 0
    call(x).sum().backward()
    assert offload.host_budget._held == 0


@quick
def test_why_it_is_left_out(rooted: Rooted) -> None:
    strategy = get("activation_offload")
    cpu = Hardware(device="cpu", name="CPU", total_bytes=1)
    gpu = Hardware(device="cuda", name="a GPU", total_bytes=1, capability=(9, 0))
    assert "host" in (strategy.unavailable("all", cpu) or "")
    assert strategy.unavailable("all", gpu) is None

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            slope: torch.Tensor = torch.func.grad(lambda each: self.inner(each).sum())(x)
            return slope

    module = Slope()
    held = rooted(module, activation_offload="all")
    with pytest.raises(RuntimeError) as failed:
        held.running(torch.randn(2, 4))
    assert "no hooks" in (strategy.fault(failed.value) or "")
    assert strategy.fault(RuntimeError("the script's own")) is None


@full
@pytest.mark.skipif(build.shim() is None, reason="bytes are counted only with a C compiler")
def test_how_much_less_is_held() -> None:
    deep = MEASURE.replace("range(6)", "range(24)")
    ran = subprocess.run(
        [sys.executable, "-c", deep, "activation_offload", "half", "all"],
        env=meter_environment(),
        check=True,
        capture_output=True,
        text=True,
    )
    peaks = json.loads(ran.stdout)
    assert peaks["half"] < 0.8 * peaks["as_is"], peaks
    assert peaks["all"] < 0.35 * peaks["as_is"], peaks
