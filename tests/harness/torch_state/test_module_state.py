"""What a model moves on in each call, whatever the samples, moves on once in a call in parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from autofit.facts import Facts
from autofit.plan import Plan
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.verification.plan_check import prove

pytestmark = pytest.mark.quick


class Handler:
    """Accepts what the seams report; the tests drive the roots by hand."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: args[-1]() if name == "backward" else None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.tanh(self.linear(x))


class Annealed(nn.Module):
    """Counts its calls twice, and its answer depends on both; runs out of memory on request."""

    temperature: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("temperature", torch.ones(()))
        self.calls = 0
        self.most, self.phase = 99, "forward"

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        self.temperature.mul_(0.9)
        if self.phase == "forward" and len(x) > self.most:
            raise MemoryError  # stands for the allocator's own error
        for block in self.blocks:
            x = block(x)
        if x.requires_grad and self.phase == "backward":
            x.register_hook(self._look)
        return x * self.temperature.clone() / self.calls

    def _look(self, gradient: torch.Tensor) -> None:
        if len(gradient) > self.most:
            raise MemoryError  # stands for the allocator's own error


def root_of(model: nn.Module) -> HarnessRoot:
    return HarnessRoot(model, Seams(Handler()), Calls(), lambda error, *_: True)


def assert_alike(ours: Annealed, plain: Annealed) -> None:
    assert ours.calls == plain.calls
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=0, atol=0)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)


@pytest.fixture
def plain() -> Annealed:
    torch.manual_seed(3)
    return Annealed().double()


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("most", [99, 2])
def test_steps_of_several_calls(plain: Annealed, phase: str, most: int) -> None:
    """In parts, and in smaller ones when memory runs out in one of them."""
    ours = copy.deepcopy(plain)
    ours.phase = phase
    root = root_of(ours)
    root.apply(Plan.of({"micro_batch": "5"}))
    first = torch.randn(12, 6).double()
    for step in range(3):
        x = first * (step + 1)
        ours.most = most if step else 99
        for output in (plain(x), root.running(x)):
            output.square().sum().backward()
    assert ours.calls == 3
    assert_alike(ours, plain)


def test_two_calls_before_one_backward(plain: Annealed) -> None:
    ours = copy.deepcopy(plain)
    root = root_of(ours)
    root.apply(Plan.of({"micro_batch": "5"}))
    one, other = torch.randn(12, 6).double(), torch.randn(8, 6).double()
    for outputs in ((plain(one), plain(other)), (root.running(one), root.running(other))):
        (outputs[0].square().sum() + outputs[1].square().sum()).backward()
    assert_alike(ours, plain)


def test_a_block_that_moves_on_is_recomputed_from_where_it_was(plain: Annealed) -> None:
    """Under a lower precision too, where a difference would drown."""
    x = torch.randn(8, 6).double()
    lower = {"precision": "bf16"}
    for levels in ({"checkpointing": "all"}, {"checkpointing": "all", **lower}, lower):
        ours = copy.deepcopy(plain)
        prove(root_of(ours), Plan.of(levels), (x,), {}, Facts())
        assert ours.calls == 0


class Masked(nn.Module):
    """Makes a table in its first call, where it had nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        if self.table is None:
            self.table = torch.arange(6.0).to(x)
        for block in self.blocks:
            x = block(x + self.table)
        return x


def test_a_table_that_is_made_is_nothing_moved() -> None:
    model = Masked().double()
    prove(
        root_of(model), Plan.of({"precision": "bf16"}), (torch.randn(8, 6).double(),), {}, Facts()
    )
    assert model.table is None, "the script's own call makes it"
