"""What scripts do to an optimizer in mid-run, under each level that changes it: none dies of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import AS_IS, REGISTRY
from autofit.strategies.base import Fidelity
from tests.strategies.sessions import under

STEPS, LATE, WORDS, WIDTH = 6, 3, 8, 64
"""Steps of a training, and the one at which something changes."""

OPTIMIZERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "sgd": lambda some: SGD(some, lr=0.05, momentum=0.9),
    "sgd without momentum": lambda some: SGD(some, lr=0.05),
    "adam": lambda some: Adam(some, lr=1e-3, foreach=True),
    "adamw": lambda some: AdamW(some, lr=1e-3, amsgrad=True),
    "adagrad": lambda some: Adagrad(some, lr=0.05),
}
EVENTS = (
    "used", "thawed", "frozen", "all but the head frozen", "added", "with a closure", "loaded",
    "sparse",
)  # fmt: skip
DENSE = ("adam", "adamw")
"""Optimizers that take no sparse gradients."""
FIRST = ("fused", "bf16_master", "released")
"""Levels that every run of the tests tries."""
PLANS = [
    pytest.param(
        {strategy.name: level.name},
        id=f"{strategy.name}-{level.name}",
        marks=pytest.mark.quick if level.name in FIRST else pytest.mark.full,
    )
    for strategy in REGISTRY
    if strategy.changes_optimizers
    for level in strategy.levels
    if level.name != AS_IS
]
APART = {Fidelity.EXACT: 1e-5, Fidelity.ROUNDING: 0.1}
"""Largest relative difference of a loss or of a weight's norm; float32's order of sums, and bf16's
rounding in some steps of a small model. A recipe is another training."""


class Branched(nn.Module):
    """Uses a layer once it is told to."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.trunk, self.late = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.uses_late = True

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.trunk(self.embed(words)))
        if self.uses_late:
            x = x + torch.tanh(self.late(x))
        found: torch.Tensor = self.head(x)
        return found


def change(event: str, model: Branched, optimizer: Optimizer) -> None:
    """Do to the training what happens late in it."""
    if event == "used":
        model.uses_late = True
    elif event in ("thawed", "frozen"):
        model.late.requires_grad_(event == "thawed")
        optimizer.zero_grad()
    elif event == "all but the head frozen":
        for each in (model.embed, model.trunk, model.late):
            each.requires_grad_(False)
    elif event == "added":
        optimizer.add_param_group({"params": [*model.late.parameters()], "weight_decay": 0.1})
    elif event == "loaded":
        optimizer.load_state_dict(optimizer.state_dict())


def train(make: Callable[[list[Any]], Optimizer], event: str, losses: list[float]) -> list[float]:
    """Return the losses, put into ``losses`` as they come, and the norms of the weights then."""
    model = Branched(sparse=event == "sparse")
    model.uses_late = event != "used"
    model.late.requires_grad_(event != "thawed")
    late = {id(each) for each in model.late.parameters()} if event == "added" else set()
    optimizer = make([each for each in model.parameters() if id(each) not in late])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        words = torch.arange(2 * WORDS) % WORDS
        loss = F.mse_loss(model(words), torch.linspace(-1, 1, len(words))[:, None])
        loss.backward()
        losses.append(loss.item())
        return loss

    for step in range(STEPS):
        if step == LATE:
            change(event, model, optimizer)
        if event == "with a closure":
            optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            optimizer.step()
    return losses + [each.detach().double().norm().item() for each in model.parameters()]


@cache
def plainly(name: str, event: str) -> list[float]:
    return train(OPTIMIZERS[name], event, [])


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("levels", PLANS)
def test_it_trains_on_as_plain_python_does(levels: dict[str, str], event: str) -> None:
    """Where the level takes such an optimizer at all, which it says before anything changes."""
    plan = Plan.of(levels)
    for name in OPTIMIZERS:
        if event == "sparse" and name in DENSE:
            continue
        expected, losses = plainly(name, event), list[float]()
        try:
            with under(plan):
                found = train(OPTIMIZERS[name], event, losses)
        except Refused:
            assert len(losses) < LATE, name
            continue
        if (most := APART.get(plan.fidelity())) is not None:
            assert found == pytest.approx(expected, rel=most, abs=1e-6), name
