"""State in host memory: the same updates, piece by piece, and what is saved is what it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.space.catalogue import clash
from autofit.strategies import Facts, get
from autofit.strategies.optimizer_offload import host_steps
from autofit.strategies.support.optimizers import ELEMENTWISE
from autofit.worker import meter
from autofit.worker.harness.patching.observers import Calls
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.meter import build
from tests.strategies.optimizers import (
    OPTIMIZERS,
    STEPS,
    Under,
    apart,
    backward,
    exact,
    model,
    owned,
    rich,
    same,
    saved,
    train,
)

pytestmark = pytest.mark.quick

GRADIENT: Any = torch.Tensor.grad
"""As torch has it: reading it notices nobody."""
STREAMED = Plan.of({"optimizer_offload": "streamed"})


@pytest.fixture
def under() -> Iterator[Under]:
    """Every optimizer steps under its ``plan``."""
    with owned() as owner:
        yield owner


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of some thousand elements are worth it, and are cut in pieces of odd size."""
    monkeypatch.setattr(host_steps, "SMALL", 1 << 10)
    monkeypatch.setattr(host_steps, "PIECE", 1000)


def made(name: str, net: nn.Module) -> Optimizer:
    more = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    optimizer: Optimizer = getattr(torch.optim, name)(net.parameters(), lr=1e-2, **more)
    return optimizer


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_it_is_the_same_training(under: Under, name: str) -> None:
    plain, changed = model(), model()
    train(plain, made(name, plain))
    under.plan = STREAMED
    optimizer = made(name, changed)
    train(changed, optimizer)
    assert apart(changed, plain) < 1e-9
    large = next(changed.parameters())
    assert hosted(optimizer, large), "its state was on the host"
    assert len(optimizer.state) == 6, "no piece is left behind"


def hosted(optimizer: Optimizer, parameter: torch.Tensor) -> list[str]:
    """Return the names of a parameter's state that lies in memory of Python's own."""
    return [
        name
        for name, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor)
        and value.dim()
        and not value.untyped_storage().resizable()
    ]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["as_is", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_beside_fused_kernels(under: Under, kind: str, level: str, dtype: torch.dtype) -> None:
    plain, changed = model(dtype), model(dtype)
    train(plain, OPTIMIZERS[kind](plain))
    under.plan = STREAMED.replace(optimizer=level)
    train(changed, OPTIMIZERS[kind](changed))
    assert apart(changed, plain) < exact(dtype)


def test_schedules_clipping_accumulation_closures_and_late_groups(under: Under) -> None:
    plain, changed = model(), model()
    expected = rich(plain, under, Plan())
    found = rich(changed, under, STREAMED)
    assert found[0] == pytest.approx(expected[0])
    assert found[1] == expected[1]
    assert apart(changed, plain) < 1e-9


@pytest.mark.parametrize("kind", ["sgd", "adamw", "adagrad", "amsgrad"])
@pytest.mark.parametrize(("first", "second"), [(STREAMED, Plan()), (Plan(), STREAMED)], ids=str)
def test_checkpoints_interchange(under: Under, kind: str, first: Plan, second: Plan) -> None:
    whole = model()
    optimizer = OPTIMIZERS[kind](whole)
    train(whole, optimizer, steps=10)
    expected = saved(optimizer.state_dict())
    train(whole, optimizer, start=10)

    under.plan = first
    early = model()
    optimizer = OPTIMIZERS[kind](early)
    train(early, optimizer, steps=10)
    assert same(optimizer.state_dict(), expected)
    checkpoint = saved({"model": early.state_dict(), "optimizer": optimizer.state_dict()})

    under.plan = second
    late = model()
    late.load_state_dict(checkpoint["model"])
    optimizer = OPTIMIZERS[kind](late)
    optimizer.load_state_dict(checkpoint["optimizer"])
    train(late, optimizer, start=10)
    assert apart(late, whole) < 1e-9


def test_a_loaded_state_is_put_on_the_host_at_once(under: Under) -> None:
    net = model()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    train(net, optimizer, steps=2)
    document = saved(optimizer.state_dict())
    under.plan = STREAMED
    other = AdamW(net.parameters(), lr=1e-2)
    other.load_state_dict(document)
    assert hosted(other, next(net.parameters())) == ["exp_avg", "exp_avg_sq"]


def test_what_there_is_goes_to_the_host_before_the_next_forward(under: Under) -> None:
    net = model()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    train(net, optimizer, steps=2)
    under.roots, under.plan = (net,), STREAMED
    under.optimizers.prepare()
    assert hosted(optimizer, next(net.parameters())) == ["exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize("kind", ["sgd", "adamw", "adagrad"])
def test_taken_back_in_mid_run_it_is_plain_to_the_end(under: Under, kind: str) -> None:
    plain, changed = model(), model()
    optimizer, other = OPTIMIZERS[kind](plain), OPTIMIZERS[kind](changed)
    train(plain, optimizer, steps=15)
    before = set(vars(other))
    train(changed, other, steps=5)
    under.plan = STREAMED
    train(changed, other, start=5, steps=5)
    under.plan = Plan()
    train(changed, other, start=10, steps=5)
    assert set(vars(other)) == before
    assert not other._optimizer_load_state_dict_pre_hooks
    assert not any(hosted(other, parameter) for parameter in changed.parameters())
    assert apart(changed, plain) < 1e-9
    assert same(other.state_dict(), optimizer.state_dict())


def test_weights_in_another_order_of_memory(under: Under) -> None:
    def net() -> nn.Module:
        torch.manual_seed(1)
        return nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def run(net: nn.Module) -> torch.Tensor:
        optimizer = AdamW(net.parameters(), lr=1e-2)
        for step in range(4):
            x = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        return next(net.parameters()).detach().clone()

    expected = run(net())
    under.plan = STREAMED
    assert torch.allclose(run(net()), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("beside", ["gradient_release", "weights"])
def test_with_steps_in_backward_and_with_masters(under: Under, beside: str) -> None:
    """Each alone and both: what ``STREAMED`` adds changes nothing to the last bit."""
    plans = {
        "gradient_release": Plan.of({"gradient_release": "released"}),
        "weights": Plan.of({"weights": "bf16_master", "gradient_release": "released"}),
    }
    found = []
    for plan in (plans[beside], plans[beside].replace(optimizer_offload="streamed")):
        under.plan = plan
        net = model(torch.float32)
        calls = Calls()
        root = HarnessRoot(net, under.seams, calls, lambda *args: False)
        root.apply(plan)
        under.roots = (net,)
        optimizer = AdamW(net.parameters(), lr=1e-2)
        for step in range(STEPS):
            optimizer.zero_grad()
            under.optimizers.prepare()
            x = torch.randn(32, 96, generator=torch.Generator().manual_seed(step))
            (root.running(x).squeeze(-1) - x.mean(-1)).pow(2).mean().backward()
            assert GRADIENT.__get__(next(net.parameters())) is None
            optimizer.step()
        found.append({name: value.clone() for name, value in net.state_dict().items()})
        under.plan = Plan()
        under.optimizers.prepare()
        root.take_back()
        calls.clear()
    assert all(value.dtype is torch.float32 for value in found[0].values())
    for name, value in found[0].items():
        assert torch.allclose(found[1][name], value, rtol=1e-5, atol=1e-7), name


def test_what_it_cannot_take_in_pieces(under: Under, monkeypatch: pytest.MonkeyPatch) -> None:
    under.plan = STREAMED

    class Own(AdamW):
        """An optimizer nobody knows."""

    net = model()
    for optimizer, reason in (
        (Own(net.parameters()), "not known to update each element"),
        (AdamW(net.parameters(), differentiable=True), "differentiable"),
        (AdamW(nn.Linear(2, 2).parameters()), "too small"),
    ):
        backward(net, 0)
        with pytest.raises(Refused, match=reason):
            optimizer.step()
    monkeypatch.setattr(host_steps.HOST_BUDGET, "take", lambda size: 0)
    optimizer = AdamW(net.parameters())
    with pytest.raises(Refused, match="no room"):
        optimizer.step()


def test_where_it_is_not_tried() -> None:
    strategy = get("optimizer_offload")
    assert strategy.inapplicable("streamed", Facts(optimizers=("LBFGS",)))
    assert strategy.inapplicable("streamed", Facts(optimizers=("AdamW", "SGD"))) is None
    assert clash(STREAMED.replace(optimizer="eight_bit"))
    assert clash(STREAMED.replace(optimizer="fused", gradient_release="released")) is None


MEASURE = """
import json, sys
from autofit.worker import meter
gauge = meter.for_device("cpu")
meter.forget()
import torch
from torch import nn
from autofit.plan import Plan
from autofit.worker.harness.patching.optimizers import Optimizers
from tests.strategies.optimizers import Under

gauge.arm()
held = {}
owner = Under()
Optimizers(owner).attach()
for level in ("as_is", "streamed"):
    owner.plan = Plan.of({"optimizer_offload": level})
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = gauge.current()
    for _ in range(2):
        model(torch.randn(4, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    held[level] = gauge.current() - before
print(json.dumps(held))
"""


@pytest.mark.skipif(build.shim() is None, reason="counts to the byte only with a C compiler")
def test_the_device_holds_no_state_between_steps() -> None:
    environment = {**os.environ, **meter.environment("cpu", None)}
    command = [sys.executable, "-c", MEASURE]
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    held: dict[str, Any] = json.loads(ran.stdout)
    assert held["as_is"] > 8 * 512 * 512 * 4 * 2
    assert held["streamed"] < 0.1 * held["as_is"], held
