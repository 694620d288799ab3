"""Another algorithm behind the script's Adam: what it computes, what it keeps, what it saves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import Adafactor

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.space.catalogue import space
from autofit.strategies import Facts, Fidelity, Hardware
from autofit.strategies.optimizer import OTHERS
from tests.strategies.optimizers import (
    Make,
    Under,
    apart,
    groups,
    model,
    owned,
    same,
    saved,
    state_bytes,
    train,
    weights,
)

pytestmark = pytest.mark.quick

KEPT = {"lion": 0.51, "sgd": 0.51, "adafactor": 0.05}
"""Share of Adam's state that is left."""


@pytest.fixture
def under() -> Iterator[Under]:
    """Every optimizer steps under its ``plan``."""
    with owned() as owner:
        yield owner


def plan(level: str) -> Plan:
    return Plan.of({"optimizer": level})


@pytest.mark.parametrize("make", [Adam, AdamW])
@pytest.mark.parametrize("level", OTHERS)
def test_it_learns_at_the_rates_made_for_adam(
    under: Under, level: str, make: Callable[..., Optimizer]
) -> None:
    plain, changed = model(torch.float32), model(torch.float32)
    adam = make(groups(plain), lr=1e-3)
    expected = train(plain, adam, steps=60)
    under.plan = plan(level)
    optimizer = make(groups(changed), lr=1e-3)
    found = train(changed, optimizer, steps=60)
    assert type(optimizer) is make
    assert apart(changed, plain) > 0.1, "it is another training"
    learned = expected[0] - torch.stack(expected[-10:]).mean()
    assert found[0] - torch.stack(found[-10:]).mean() > 0.5 * learned
    assert 0 < state_bytes(optimizer) < KEPT[level] * state_bytes(adam)


def test_adafactor_is_that_of_hugging_face_s_trainer(under: Under) -> None:
    plain, changed = model(torch.float32), model(torch.float32)
    theirs: Any = Adafactor(  # type: ignore[no-untyped-call]
        groups(plain), lr=1e-3, scale_parameter=False, relative_step=False, warmup_init=False
    )
    train(plain, theirs, steps=30)
    under.plan = plan("adafactor")
    train(changed, AdamW(groups(changed), lr=1e-3), steps=30)
    assert apart(changed, plain) < 1e-4


class Lion(Optimizer):
    """Lion in plain words."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(0.9 * m + 0.1 * p.grad))
                m.mul_(0.99).add_(0.01 * p.grad)


def test_lion_is_lion_at_a_tenth_of_the_rate(under: Under) -> None:
    plain, changed = model(), model()
    tenth = [
        {**g, "lr": g.get("lr", 1e-3) / 10, "weight_decay": 10 * g["weight_decay"]}
        for g in groups(plain)
    ]
    train(plain, Lion(tenth, lr=1e-4))
    under.plan = plan("lion")
    train(changed, AdamW(groups(changed), lr=1e-3))
    assert apart(changed, plain) < 1e-9


def test_sgd_s_steps_are_as_long_as_it_says(under: Under) -> None:
    under.plan = plan("sgd")
    net = model(torch.float32)
    optimizer = AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    before = [p.detach().clone() for p in net.parameters()]
    train(net, optimizer, steps=1)
    for old, parameter in zip(before, net.parameters(), strict=True):
        moved = parameter.detach() - old
        assert float(moved.square().mean().sqrt()) == pytest.approx(0.2 * 1e-2, rel=1e-3)
        assert parameter.grad is not None
        cosine = nn.functional.cosine_similarity(-moved.flatten(), parameter.grad.flatten(), dim=0)
        assert float(cosine) > 0.999, "down the gradient"


@pytest.mark.parametrize("level", OTHERS)
def test_a_gradient_of_zeros_moves_nothing(under: Under, level: str) -> None:
    under.plan = plan(level)
    net = model(torch.float32)
    optimizer = AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(weights(net), weights(model(torch.float32)))


@pytest.mark.parametrize("level", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_its_checkpoints_say_so_and_go_on(under: Under, level: str, dtype: torch.dtype) -> None:
    def made(net: nn.Module) -> tuple[Optimizer, LambdaLR]:
        optimizer = AdamW(groups(net), lr=1e-3)
        return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def run(net: nn.Module, start: int, parts: tuple[Optimizer, LambdaLR]) -> None:
        for step in range(start, start + 5):
            train(net, parts[0], start=step, steps=1)
            parts[1].step()

    under.plan = plan(level)
    whole = model(dtype)
    parts = made(whole)
    run(whole, 0, parts)
    document = parts[0].state_dict()
    assert document["algorithm"] == level
    names = {name for state in document["state"].values() for name in state}
    assert names & {"exp_avg", "momentum_buffer", "exp_avg_sq_row"}
    checkpoint = saved(
        {"model": whole.state_dict(), "optimizer": document, "schedule": parts[1].state_dict()}
    )
    run(whole, 5, parts)

    late = model(dtype)
    late.load_state_dict(checkpoint["model"])
    again = made(late)
    again[0].load_state_dict(checkpoint["optimizer"])
    again[1].load_state_dict(checkpoint["schedule"])
    assert same(again[0].state_dict(), checkpoint["optimizer"], 1e-2)
    run(late, 5, again)
    assert apart(late, whole) < (1e-6 if dtype is torch.float32 else 0.1)
    twin = copy.deepcopy(parts[0])
    assert same(twin.state_dict()["state"], parts[0].state_dict()["state"])
    assert b"autofit" not in pickle.dumps(parts[0])


@pytest.mark.parametrize("level", OTHERS)
def test_state_of_another_algorithm_is_dropped(under: Under, level: str) -> None:
    plain = model(torch.float32)
    adam = AdamW(plain.parameters(), lr=1e-3)
    train(plain, adam, steps=5)
    under.plan = plan(level)
    net = model(torch.float32)
    optimizer = AdamW(net.parameters(), lr=1e-3)
    optimizer.load_state_dict(adam.state_dict())
    assert not optimizer.state_dict()["state"]
    train(net, optimizer, steps=2)
    under.plan = Plan()
    train(net, optimizer, steps=2)
    assert same(
        {k: v.shape for k, v in optimizer.state_dict()["state"][0].items()},
        {k: v.shape for k, v in adam.state_dict()["state"][0].items()},
    )
    assert optimizer.state_dict().keys() == {"state", "param_groups"}


REFUSED: list[tuple[Make, str]] = [
    (lambda net: SGD(net.parameters(), lr=0.1), "SGD is not torch's Adam or AdamW"),
    (lambda net: AdamW(net.parameters(), maximize=True), "AdamW is maximize"),
    (lambda net: AdamW(net.parameters(), lr=torch.tensor(0.1)), "rate is a tensor"),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED, ids=[case[1] for case in REFUSED])
def test_what_is_not_understood_is_refused(under: Under, make: Make, reason: str) -> None:
    under.plan = plan("lion")
    net = model(torch.float32)
    with pytest.raises(Refused, match=reason):
        train(net, make(net), steps=1)
    assert torch.equal(weights(net), weights(model(torch.float32)))


def test_it_is_offered_to_those_who_allow_other_training() -> None:
    cpu = Hardware(device="cpu", name="a CPU", total_bytes=1 << 34)
    facts = Facts(optimizers=("AdamW",))
    for allow in Fidelity:
        found = dict(space(cpu, facts, allow=allow).levels)["optimizer"]
        assert (set(OTHERS) <= set(found)) == (allow is Fidelity.RECIPE)
        assert not set(OTHERS) & set(found) or allow is Fidelity.RECIPE
