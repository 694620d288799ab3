"""The proof of a plan, where a few samples do not fit without the plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import Facts
from autofit.worker.harness.proof import prove
from autofit.worker.harness.roots import HarnessRoot
from autofit.worker.harness.seams import Calls, Seams

pytestmark = pytest.mark.quick
PLAN = Plan.of({"checkpointing": "all"})


class Block(nn.Module):
    def __init__(self, grows: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        self.grows = grows
        self.calls = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.grows
        scaled: torch.Tensor = self.inner(x) * self.calls
        return scaled


class Net(nn.Module):
    """Two samples do not fit; a block that ``grows`` is another one when it runs again."""

    def __init__(self, grows: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(grows) for _ in range(2))
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        if len(x) > 1:
            raise torch.OutOfMemoryError("out of memory")
        for block in self.blocks:
            x = block(x)
        return x


class Short(nn.Module):
    """Nothing fits."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")


class _Handler:
    def __getattr__(self, name: str) -> object:
        return lambda *args: args[-1]() if name == "backward" else None


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls()
    yield made
    made.clear()


def proven(module: nn.Module, calls: Calls) -> HarnessRoot:
    held = HarnessRoot(module, Seams(_Handler()), calls, lambda *args: False)  # type: ignore[arg-type]
    prove(held, PLAN, (torch.randn(6, 8),), {}, Facts())
    return held


def test_then_one_is_enough(calls: Calls) -> None:
    module = Net()
    held = proven(module, calls)
    assert module.sizes == [4, 1, 1]
    assert held.plan == PLAN
    held.take_back()


def test_and_one_shows_what_is_not_the_same(calls: Calls) -> None:
    module = Net(grows=True)
    with pytest.raises(Refused):
        proven(module, calls)
    assert module.sizes == [4, 1, 1]


def test_what_one_does_not_fit_either_is_a_shortage(calls: Calls) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        proven(Short(), calls)
