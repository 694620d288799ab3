"""The Python export is a program: it is run, and trains as the plain loop does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from torch import nn

from autofit.analysis.result import Result
from autofit.export import render
from autofit.plan import Plan
from autofit.strategies import AS_IS, REGISTRY, Fidelity
from autofit.strategies.inspection.blocks import repeated_blocks
from tests.strategies.models import Parts

pytestmark = pytest.mark.quick
MakeResult = Callable[..., Result]

LEVELS = [
    pytest.param(
        strategy.name,
        "3" if level.name == "auto" else level.name,
        marks=[pytest.mark.full] if (strategy.name, level.name) == ("compile", "full") else [],
    )
    for strategy in REGISTRY
    for level in strategy.levels
    if level.name != AS_IS
]


class Toy(nn.Module):
    """A few residual blocks in a list, as most models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(x)
        return out


def program(result: Result) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(render("python", result, partial=True), "plan.py", "exec"), names)
    return names


def trained(names: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    torch.manual_seed(0)
    model: nn.Module = Toy()
    inputs, targets = torch.randn(10, 8), torch.randint(4, (10,))
    names["prepare"](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = names["train_step"]
    losses = [step(model, optimizer, nn.CrossEntropyLoss(), inputs, targets) for _ in range(3)]
    return copy.deepcopy(model.state_dict()), losses


@pytest.fixture
def plain(make_result: MakeResult) -> tuple[dict[str, torch.Tensor], list[float]]:
    return trained(program(make_result(Plan())))


def test_as_it_is_is_a_plain_loop(plain: tuple[dict[str, torch.Tensor], list[float]]) -> None:
    torch.manual_seed(0)
    model = Toy()
    inputs, targets = torch.randn(10, 8), torch.randint(4, (10,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    torch.testing.assert_close(plain[0], dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(("strategy", "level"), LEVELS)
def test_every_level_by_hand_trains_the_same(
    strategy: str,
    level: str,
    make_result: MakeResult,
    plain: tuple[dict[str, torch.Tensor], list[float]],
) -> None:
    plan = Plan.of({strategy: level})
    if plan.fidelity() is Fidelity.RECIPE or level == "tf32":
        compile(render("python", make_result(plan), partial=True), "plan.py", "exec")
        return
    before = torch.get_float32_matmul_precision()
    try:
        with functorch.patch(activation_memory_budget=functorch.activation_memory_budget):
            weights, losses = trained(program(make_result(plan)))
    finally:
        torch.set_float32_matmul_precision(before)
        torch.compiler.reset()
    tolerance = 0.05 if plan.fidelity() is Fidelity.ROUNDING else 1e-6
    torch.testing.assert_close(weights, plain[0], rtol=tolerance, atol=tolerance)
    assert losses == pytest.approx(plain[1], rel=tolerance)


def test_all_of_a_plan_at_once(
    make_result: MakeResult, plain: tuple[dict[str, torch.Tensor], list[float]]
) -> None:
    plan = Plan.of({"precision": "bf16", "checkpointing": "2", "micro_batch": "3"})
    text = render("python", make_result(plan), partial=True)
    assert "inputs.split(3)" in text
    assert "torch.bfloat16" in text
    assert "checkpoint(" in text or "checkpoint," in text
    weights, losses = trained(program(make_result(plan)))
    torch.testing.assert_close(weights, plain[0], rtol=0.05, atol=0.05)
    assert losses[-1] < losses[0]


def alike() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


STEM, HEAD = nn.Linear(8, 8), nn.Linear(8, 4)
MODELS: list[tuple[Callable[[], nn.Module], int]] = [
    (Toy, 3),
    (lambda: nn.Sequential(STEM, alike(), alike(), alike(), HEAD), 3),
    (lambda: Parts(STEM, alike(), alike(), HEAD), 2),
    (lambda: Parts(*[nn.ModuleList([alike(), alike()]) for _ in range(2)], HEAD), 4),
    (lambda: Parts(nn.Sequential(alike(), alike()), nn.Sequential(STEM, nn.ReLU(), HEAD)), 2),
    (lambda: Parts(alike(), alike(), nn.Sequential(STEM, HEAD), nn.Sequential(Toy())), 5),
    (lambda: Parts(Parts(alike(), alike()), Parts(alike(), alike())), 2),
    (lambda: Parts(STEM, nn.ModuleList([Parts(alike())]), HEAD), 1),
    (lambda: Parts(*[Parts(alike(), alike(), nn.Linear(8, 8)) for _ in range(2)]), 2),
    (lambda: Parts(*[Parts(nn.Sequential(Toy(), Toy(), Toy()), HEAD) for _ in range(2)]), 6),
    (lambda: Parts(*[nn.ModuleDict({"a": Toy(), "b": alike()}) for _ in range(3)], Toy()), 4),
]


@pytest.mark.parametrize(("made", "count"), MODELS)
def test_the_blocks_are_those_of_a_search(
    made: Callable[[], nn.Module], count: int, make_result: MakeResult
) -> None:
    model = made()
    program(make_result(Plan.of({"checkpointing": "all"})))["prepare"](model)
    found = [each for each in model.modules() if "forward" in vars(each)]
    assert found == repeated_blocks(model)
    assert len(found) == count
