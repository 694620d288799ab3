"""Gradients dropped where a script sets them to zero: the same updates, fewer bytes in forward."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autofit.plan import Plan
from autofit.space.catalogue import clash
from autofit.strategies import Facts, get
from autofit.worker import meter
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.meter import build

pytestmark = pytest.mark.quick

PLAN = Plan.of({"zero_grad": "set_to_none"})


class Net(nn.Module):
    """The second half is used every other step: its gradients are zeros in between."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        y: torch.Tensor = self.always(x)
        return y if step % 2 else self.sometimes(y)


class _Handler:
    zeroed = 0

    def zeroes(self, owner: Any, *, in_place: bool) -> None:
        self.zeroed += in_place

    def __getattr__(self, name: str) -> Any:
        return lambda *args: args[-1]() if name == "backward" else None


@pytest.fixture
def root() -> Iterator[Callable[[nn.Module], HarnessRoot]]:
    """Return a module's root; it is left as it was."""
    calls, roots = Calls(), []

    def make(module: nn.Module) -> HarnessRoot:
        roots.append(HarnessRoot(module, Seams(_Handler()), calls, lambda *args: False))
        return roots[-1]

    yield make
    for each in roots:
        each.take_back()
    calls.clear()


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
}


def trained(
    module: nn.Module, make: Callable[..., torch.optim.Optimizer], call: Any, *, by_module: bool
) -> list[torch.Tensor]:
    """Train for some steps as a script does; return the parameters after each."""
    torch.manual_seed(1)
    optimizer = make(module.parameters())
    owner = module if by_module else optimizer
    found = []
    for step in range(6):
        owner.zero_grad(set_to_none=False)
        for _ in range(2):
            call(torch.randn(3, 4).double(), step).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        found += [p.detach().clone() for p in module.parameters()]
    return found


@pytest.mark.parametrize("by_module", [False, True], ids=["optimizer", "module"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_updates_are_those_of_zeros(make: Any, by_module: bool, root: Any) -> None:
    module = Net().double()
    twin = copy.deepcopy(module)
    expected = trained(twin, make, twin, by_module=by_module)
    held = root(module)
    held.apply(PLAN)
    found = trained(module, make, lambda *args: held.call(args, {}), by_module=by_module)
    for one, other in zip(found, expected, strict=True):  # clipping adds up fewer norms
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)
    assert module.never.weight.grad is None  # nor has it one as the script is


def test_what_was_dropped_comes_back_with_the_undo(root: Any) -> None:
    module = Net()
    plain = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    held = root(module)
    held.apply(PLAN)
    held.call((torch.randn(3, 4), 0), {}).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert module.sometimes.weight.grad is None
    held.take_back()
    assert module.sometimes.weight.grad is not None
    assert not module.sometimes.weight.grad.any()
    assert (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad) == plain


def test_sparse_gradients_stay(root: Any) -> None:
    module = nn.Embedding(5, 2, sparse=True)
    held = root(module)
    held.apply(PLAN)
    held.call((torch.tensor([1]),), {}).sum().backward()
    module.zero_grad(set_to_none=False)
    assert module.weight.grad is not None
    assert module.weight.grad.is_sparse


def test_it_is_seen_where_a_script_asks_for_zeros() -> None:
    handler = _Handler()
    seams = Seams(handler)
    seams.attach()
    try:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        optimizer.zero_grad()
        assert handler.zeroed == 0
        optimizer.zero_grad(set_to_none=False)
        assert handler.zeroed == 1
    finally:
        seams.detach()
    strategy, known = get("zero_grad"), Facts(optimizers=("SGD",))
    assert "does not set" in (strategy.inapplicable("set_to_none", known) or "")
    told = Facts(optimizers=("SGD",), gradients_zeroed=True)
    assert strategy.inapplicable("set_to_none", told) is None
    assert "gradient_release" in (clash(PLAN.replace(gradient_release="released")) or "")


@pytest.mark.full
def test_fewer_bytes() -> None:
    """Of the worst moment of the second step, in which zeros would wait through forward."""
    if build.shim() is None:
        pytest.skip("the memory of a CPU is counted to the byte only with a C compiler")
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env={**os.environ, **meter.environment("cpu", None)},
        check=True,
        capture_output=True,
        text=True,
    )
    peaks = json.loads(ran.stdout)
    assert peaks["set_to_none"] < peaks["as_is"] - 0.5 * peaks["weights"], peaks


MEASURE = """
import json
from autofit.worker import meter
gauge = meter.for_device("cpu")
meter.forget()
import torch
from torch import nn
from autofit.plan import Plan
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.patching.observers import Calls, Seams

class Handler:
    def __getattr__(self, name):
        return lambda *args: args[-1]() if name == "backward" else None

gauge.arm()
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
x = torch.randn(2048, 512)
peaks = {"weights": sum(p.nbytes for p in model.parameters())}
for level in ("as_is", "set_to_none"):
    root = HarnessRoot(model, Seams(Handler()), Calls(), lambda *args: False)
    root.apply(Plan.of({"zero_grad": level}))
    model.zero_grad()
    before = gauge.current()
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        gauge.reset()
        root.call((x,), {}).sum().backward()
        optimizer.step()
    peaks[level] = gauge.peak().allocated - before
    root.take_back()
print(json.dumps(peaks))
"""
