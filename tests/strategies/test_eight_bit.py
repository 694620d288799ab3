"""Optimizer state in 8 bits: the same algorithm within rounding, checkpoints that interchange."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies.optimizer import bitsandbytes_kernels
from autofit.strategies.support.optimizers import bitsandbytes as quietly
from tests.strategies.optimizers import (
    WIDTH,
    Make,
    Under,
    apart,
    backward,
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

EIGHT_BIT = Plan.of({"optimizer": "eight_bit"})


@pytest.fixture
def under() -> Iterator[Under]:
    """Every optimizer steps under its ``plan``."""
    with owned() as owner:
        yield owner


ADAMS: dict[str, Make] = {
    "adam": lambda net: Adam(net.parameters(), lr=1e-3, weight_decay=0.1),
    "adamw": lambda net: AdamW(groups(net), lr=1e-3),
}


KINDS = ["adamw", pytest.param("adam", marks=pytest.mark.full)]


@pytest.mark.parametrize("kind", KINDS)
def test_eight_bits_train_within_rounding(under: Under, kind: str) -> None:
    plain, eight = model(torch.float32), model(torch.float32)
    optimizer = ADAMS[kind](plain)
    expected = train(plain, optimizer, steps=60)
    under.plan = EIGHT_BIT
    small = ADAMS[kind](eight)
    found = train(eight, small, steps=60)
    assert torch.stack(found[-10:]).mean() == pytest.approx(
        torch.stack(expected[-10:]).mean().item(), rel=0.1
    )
    assert 0 < apart(eight, plain) < 0.2
    assert state_bytes(small) < 0.3 * state_bytes(optimizer)


@pytest.mark.parametrize("kind", ADAMS)
def test_one_step_of_eight_bits_is_the_plain_step(under: Under, kind: str) -> None:
    """From zeros the first update sees no rounding at all."""
    plain, eight = model(torch.float32), model(torch.float32)
    train(plain, ADAMS[kind](plain), steps=1)
    under.plan = EIGHT_BIT
    train(eight, ADAMS[kind](eight), steps=1)
    assert apart(eight, plain) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("first", "second"), [(EIGHT_BIT, Plan()), (Plan(), EIGHT_BIT)], ids=str)
def test_eight_bit_checkpoints_interchange(
    under: Under, kind: str, first: Plan, second: Plan
) -> None:
    whole = model(torch.float32)
    plain = ADAMS[kind](whole)
    train(whole, plain, steps=10)
    expected = copy.deepcopy(plain.state_dict())
    train(whole, plain, start=10)

    under.plan = first
    early = model(torch.float32)
    optimizer = ADAMS[kind](early)
    train(early, optimizer, steps=10)
    document = optimizer.state_dict()
    assert same(document["param_groups"], expected["param_groups"])
    assert document["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        found = document["state"][index]
        assert {k: (v.dtype, v.shape) for k, v in found.items()} == {
            k: (v.dtype, v.shape) for k, v in state.items()
        }
        assert found["step"] == state["step"] == 10
        assert (found["exp_avg"] - state["exp_avg"]).norm() < 0.1 * state["exp_avg"].norm()
    checkpoint = saved({"model": early.state_dict(), "optimizer": document})

    under.plan = second
    late = model(torch.float32)
    late.load_state_dict(checkpoint["model"])
    optimizer = ADAMS[kind](late)
    optimizer.load_state_dict(checkpoint["optimizer"])
    before = optimizer.state_dict()
    assert same(before, checkpoint["optimizer"], 1e-12)
    train(late, optimizer, start=10)
    assert apart(late, whole) < 0.2
    if second == EIGHT_BIT:
        assert state_bytes(optimizer) < 0.3 * state_bytes(plain)


def test_a_pickle_of_eight_bits_is_plain(under: Under) -> None:
    under.plan = EIGHT_BIT
    net = model(torch.float32)
    optimizer = AdamW(net.parameters(), lr=1e-3)
    train(net, optimizer, steps=5)
    under.plan = Plan()
    twin, other = pickle.loads(pickle.dumps((net, optimizer)))
    assert {name for state in other.state.values() for name in state} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    train(twin, other, start=5, steps=3)
    assert same(other.state_dict()["param_groups"], optimizer.state_dict()["param_groups"])
    assert {float(state["step"]) for state in other.state.values()} == {8.0}


def test_embeddings_and_small_parameters_keep_32_bits(under: Under) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, WIDTH)
            self.head = nn.Linear(WIDTH, 64, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(tokens))  # type: ignore[no-any-return]

    net = Net()
    under.plan, under.roots = EIGHT_BIT, (net,)
    optimizer = AdamW(net.parameters(), lr=1e-3)
    for _ in range(2):
        nn.functional.cross_entropy(net(torch.arange(64)), torch.arange(64)).backward()
        optimizer.step()
    assert optimizer.state[net.table.weight]["exp_avg"].dtype is torch.float32
    assert optimizer.state[net.head.weight]["exp_avg_codes"].dtype is torch.uint8


def test_channels_last_weights_are_updated_in_their_own_order(under: Under) -> None:
    def conv() -> nn.Module:
        torch.manual_seed(1)
        net = nn.Conv2d(32, 32, 3)
        net.weight.data = net.weight.data.to(memory_format=torch.channels_last)
        return net

    def step(net: nn.Module) -> dict[str, Any]:
        optimizer = AdamW(net.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(2, 32, 8, 8, generator=generator)
        net(x).pow(3).sum().backward()
        optimizer.step()
        return optimizer.state_dict()

    plain, eight = conv(), conv()
    expected = step(plain)
    under.plan = EIGHT_BIT
    found = step(eight)
    assert torch.allclose(weights(eight), weights(plain), atol=1e-6)
    moment, other = (each["state"][0]["exp_avg"] for each in (found, expected))
    assert moment.stride() == other.stride()
    assert (moment - other).norm() < 0.1 * other.norm()


def test_eight_bits_are_put_in_place_in_a_run_that_has_begun(under: Under) -> None:
    """So a launch goes on to plans that have them (``Level.late``)."""
    plain, changed = model(torch.float32), model(torch.float32)
    train(plain, AdamW(plain.parameters(), lr=1e-3), steps=20)
    optimizer = AdamW(changed.parameters(), lr=1e-3)
    train(changed, optimizer, steps=10)
    whole = state_bytes(optimizer)
    under.plan, under.roots = EIGHT_BIT, (changed,)
    under.optimizers.prepare()
    assert state_bytes(optimizer) < 0.3 * whole, "before the forward that may need the room"
    train(changed, optimizer, start=10, steps=10)
    assert 0 < apart(changed, plain) < 0.2


def test_eight_bits_are_taken_back_into_plain_state(under: Under) -> None:
    plain, changed = model(torch.float32), model(torch.float32)
    train(plain, AdamW(plain.parameters(), lr=1e-3), steps=20)
    optimizer = AdamW(changed.parameters(), lr=1e-3)
    under.plan = EIGHT_BIT
    train(changed, optimizer, steps=10)
    under.plan = Plan()
    train(changed, optimizer, start=10, steps=10)
    assert {name for state in optimizer.state.values() for name in state} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    assert apart(changed, plain) < 0.2


@pytest.mark.parametrize("kernel", ["adam", "lion"])
def test_the_kernels_are_tried_before_they_are_trusted(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = functools.partial(
        bitsandbytes_kernels.broken, kernel, torch.device("cpu"), torch.float32
    )
    bitsandbytes_kernels.broken.cache_clear()
    assert tried() is None
    bitsandbytes_kernels.broken.cache_clear()
    kernels = quietly()
    monkeypatch.setattr(kernels, "optimizer_update_8bit_blockwise", lambda *_, **__: None)
    assert "compute wrong results" in (tried() or "")
    bitsandbytes_kernels.broken.cache_clear()


def test_codes_come_back_as_they_were() -> None:
    values = bitsandbytes_kernels.maps(torch.device("cpu"))[0]
    row = torch.randn(1000)
    codes, scales = bitsandbytes_kernels.quantise(row, values)
    once = bitsandbytes_kernels.dequantise(codes, scales, values)
    again, _ = bitsandbytes_kernels.quantise(once, values)
    assert torch.equal(again, codes)
    assert (once - row).norm() < 0.05 * row.norm()


# --- Lion -------------------------------------------------------------------------------------


class Lion(Optimizer):
    """Lion as scripts bring it along: torch has none."""

    cautious = False

    def __init__(self, params: Any, lr: float = 1e-4, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad  # which is never missing: it does not look
                moment = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                direction = moment.lerp(gradient, 1 - beta1).sign_()
                if self.cautious:
                    direction.mul_(direction * gradient > 0)
                parameter.mul_(1 - rate * group["weight_decay"]).sub_(direction, alpha=rate)
                moment.lerp_(gradient, 1 - beta2)


class Cautious(Lion):
    """Steps only where the gradient agrees: another algorithm, whatever it is called."""

    cautious = True


Cautious.__name__ = "Lion"

LIONS: dict[str, Make] = {
    "own": lambda net: Lion(groups(net), lr=3e-4),
    "bitsandbytes": lambda net: bitsandbytes.optim.Lion(groups(net), lr=3e-4),
}


@pytest.mark.parametrize("kind", LIONS)
def test_a_lion_is_known_by_what_it_computes(under: Under, kind: str) -> None:
    plain, eight = model(torch.float32), model(torch.float32)
    optimizer = LIONS[kind](plain)
    expected = train(plain, optimizer, steps=40)
    under.plan = EIGHT_BIT
    small = LIONS[kind](eight)
    found = train(eight, small, steps=40)
    assert torch.stack(found[-10:]).mean() == pytest.approx(
        torch.stack(expected[-10:]).mean().item(), rel=0.1
    )
    assert 0 < apart(eight, plain) < 0.3
    assert state_bytes(small) < 0.3 * state_bytes(optimizer)
    assert {type(each) for each in (small,)} == {type(optimizer)}


@pytest.mark.parametrize("kind", LIONS)
def test_one_step_of_lion_is_the_plain_step(under: Under, kind: str) -> None:
    plain, eight = model(torch.float32), model(torch.float32)
    train(plain, LIONS[kind](plain), steps=1)
    under.plan = EIGHT_BIT
    train(eight, LIONS[kind](eight), steps=1)
    assert apart(eight, plain) < 1e-3


@pytest.mark.parametrize("kind", LIONS)
@pytest.mark.parametrize(("first", "second"), [(EIGHT_BIT, Plan()), (Plan(), EIGHT_BIT)], ids=str)
def test_lion_s_checkpoints_interchange(under: Under, kind: str, first: Plan, second: Plan) -> None:
    whole = model(torch.float32)
    plain = LIONS[kind](whole)
    train(whole, plain, steps=10)
    expected = copy.deepcopy(plain.state_dict())
    train(whole, plain, start=10)

    under.plan = first
    early = model(torch.float32)
    optimizer = LIONS[kind](early)
    train(early, optimizer, steps=10)
    document = optimizer.state_dict()
    assert same(document["param_groups"], expected["param_groups"])
    assert shapes(document["state"]) == shapes(expected["state"])
    checkpoint = saved({"model": early.state_dict(), "optimizer": document})

    under.plan = second
    late = model(torch.float32)
    late.load_state_dict(checkpoint["model"])
    optimizer = LIONS[kind](late)
    optimizer.load_state_dict(checkpoint["optimizer"])
    train(late, optimizer, start=10)
    assert apart(late, whole) < 0.3
    if second == EIGHT_BIT:
        assert state_bytes(optimizer) < 0.3 * state_bytes(plain)


def shapes(document: Any) -> Any:
    """Return a document with each tensor's precision and shape in its place."""
    if isinstance(document, dict):
        return {key: shapes(value) for key, value in document.items()}
    return (document.dtype, document.shape) if isinstance(document, torch.Tensor) else document


def test_lion_is_taken_back_into_plain_state(under: Under) -> None:
    plain, changed = model(torch.float32), model(torch.float32)
    expected = LIONS["own"](plain)
    train(plain, expected, steps=20)
    optimizer = LIONS["own"](changed)
    before = set(vars(optimizer))
    under.plan = EIGHT_BIT
    train(changed, optimizer, steps=10)
    under.plan = Plan()
    train(changed, optimizer, start=10, steps=10)
    assert shapes(optimizer.state_dict()) == shapes(expected.state_dict())
    assert set(vars(optimizer)) == before
    assert apart(changed, plain) < 0.3


OTHERS: list[tuple[Make, str]] = [
    (lambda net: Cautious(net.parameters()), "does not compute what Lion does"),
    (lambda net: bitsandbytes.optim.Lion(net.parameters(), optim_bits=8), "in 8 bits already"),
    (lambda net: renamed(AdamW)(net.parameters()), "not known to be Lion"),
    (lambda net: renamed(torch.optim.SGD)(net.parameters(), lr=0.1), "has no betas"),
]


def test_bitsandbytes_overrides_are_not_passed_over(
    under: Under, monkeypatch: pytest.MonkeyPatch
) -> None:
    under.plan = EIGHT_BIT
    net = model(torch.float32)
    optimizer = bitsandbytes.optim.Lion(net.parameters(), lr=3e-4)
    overrides = [(net.get_submodule("0"), "weight", {"lr": 1.0})]
    monkeypatch.setattr(optimizer.mng, "module_weight_config_triple", overrides)
    with pytest.raises(Refused, match="overrides"):
        train(net, optimizer, steps=1)


def renamed(cls: type[Optimizer]) -> Any:
    """Return a class that is called Lion and is something else."""
    return type("Lion", (cls,), {})


@pytest.mark.parametrize(("make", "reason"), OTHERS, ids=[case[1] for case in OTHERS])
def test_what_is_only_called_lion_is_refused(under: Under, make: Make, reason: str) -> None:
    under.plan = EIGHT_BIT
    net = model(torch.float32)
    optimizer = make(net)
    start = weights(net)
    with pytest.raises(Refused, match=reason):
        train(net, optimizer, steps=1)
    assert torch.equal(weights(net), start)
    assert not optimizer.state


def test_a_plan_that_changes_in_a_closure_holds_from_the_next_step(under: Under) -> None:
    """A search changes it before a call of the model, which Lightning makes within the step."""
    net = model(torch.float32)
    optimizer = AdamW(net.parameters(), lr=1e-3)
    under.roots = (net,)
    train(net, optimizer, steps=2)

    def closure() -> float:
        under.plan = EIGHT_BIT
        under.optimizers.prepare()
        optimizer.zero_grad()
        return float(backward(net, 2))

    weight = net.get_parameter("0.weight")
    optimizer.step(closure)
    assert optimizer.state[weight]["exp_avg"].dtype is torch.float32
    optimizer.step(closure)
    assert torch.uint8 in {
        getattr(each, "dtype", None) for each in optimizer.state[weight].values()
    }
