"""The script's own optimizer computed otherwise: the same updates, checkpoints that interchange."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import Facts, Fidelity
from autofit.strategies.optimizer import fused
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.patching.optimizers import HarnessOptimizer, Optimizers
from autofit.worker.harness.session.root import HarnessRoot
from tests.roots import Bystander
from tests.strategies.optimizers import (
    OPTIMIZERS,
    STEPS,
    WIDTH,
    Make,
    Under,
    apart,
    backward,
    batch,
    exact,
    model,
    owned,
    rich,
    same,
    saved,
    train,
    weights,
)
from tests.strategies.sessions import under as session

pytestmark = pytest.mark.quick

FUSED = Plan.of({"optimizer": "fused"})
EIGHT_BIT = Plan.of({"optimizer": "eight_bit"})


@pytest.fixture
def under() -> Iterator[Under]:
    """Every optimizer steps under its ``plan``."""
    with owned() as owner:
        yield owner


# --- fused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fused_is_the_same_training(under: Under, kind: str, dtype: torch.dtype) -> None:
    plain, fused = model(dtype), model(dtype)
    train(plain, OPTIMIZERS[kind](plain))
    under.plan = FUSED
    optimizer = OPTIMIZERS[kind](fused)
    flags = [dict(group, params=None) for group in optimizer.param_groups]
    with counted() as fused_calls:
        train(fused, optimizer)
    assert len(fused_calls) == STEPS * len(optimizer.param_groups)
    assert float((weights(plain) - weights(model(dtype))).norm()) > 0
    assert apart(fused, plain) < exact(dtype)
    assert [dict(group, params=None) for group in optimizer.param_groups] == flags


class Sharp(Optimizer):
    """Climbs, then steps with the gradient found there: the step is its base optimizer's (SAM)."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net.parameters(), {"rho": 0.05})
        self.base = SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        for p in weights_of(self):
            self.state[p]["before"] = p.clone()
            assert p.grad is not None
            p.add_(p.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for p in weights_of(self):
            p.copy_(self.state[p]["before"])
        self.base.step()
        self.zero_grad()


def weights_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def test_an_optimizer_that_another_wraps_is_the_one_that_steps() -> None:
    known: list[tuple[str, ...]] = []

    def sharpened(net: nn.Module, facts: Callable[[], Facts]) -> None:
        optimizer = Sharp(net)
        for step in range(STEPS):
            backward(net, step)
            known.append(facts().optimizers)
            optimizer.climb()
            backward(net, step)
            optimizer.descend()

    plain, found = model(), model()
    sharpened(plain, Facts)
    known.clear()
    with session(FUSED) as ours, counted() as calls:
        sharpened(found, lambda: ours.facts)
    assert len(calls) == STEPS
    assert known == [("SGD",)] * STEPS
    assert apart(found, plain) < exact(torch.float64)


class counted:
    """Counts the calls of torch's fused kernels: a test of nothing else would pass unchanged."""

    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> list[str]:
        calls: list[str] = []
        for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
            self.patch.setattr(torch, name, self._counting(name, calls))
        return calls

    def __exit__(self, *_: object) -> None:
        self.patch.undo()

    @staticmethod
    def _counting(name: str, calls: list[str]) -> Callable[..., Any]:
        plain = getattr(torch, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return plain(*args, **kwargs)

        return call


def test_schedules_clipping_accumulation_closures_and_late_groups(under: Under) -> None:
    plain, fused = model(), model()
    expected = rich(plain, under, Plan())
    with counted() as calls:
        found = rich(fused, under, FUSED)
    assert calls
    assert found[0] == pytest.approx(expected[0])
    assert found[1] == expected[1] == 4
    assert apart(fused, plain) < 1e-9


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "adagrad"])
def test_taken_back_in_mid_run_it_is_plain_to_the_end(under: Under, kind: str) -> None:
    plain, changed = model(), model()
    optimizer = OPTIMIZERS[kind](plain)
    train(plain, optimizer, steps=2 * STEPS)
    other = OPTIMIZERS[kind](changed)
    before = set(vars(other))
    train(changed, other, steps=5)
    under.plan = FUSED
    train(changed, other, start=5, steps=10)
    under.plan = Plan()
    with counted() as calls:
        train(changed, other, start=15, steps=2 * STEPS - 15)
    assert not calls
    assert set(vars(other)) == before
    assert not other._optimizer_state_dict_post_hooks
    assert apart(changed, plain) < 1e-9
    assert same(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "adagrad", "amsgrad"])
@pytest.mark.parametrize(("first", "second"), [(FUSED, Plan()), (Plan(), FUSED)], ids=str)
def test_checkpoints_interchange(under: Under, kind: str, first: Plan, second: Plan) -> None:
    whole = model()
    optimizer = OPTIMIZERS[kind](whole)
    train(whole, optimizer, steps=10)
    expected = copy.deepcopy(optimizer.state_dict())
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


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_and_pickles_are_plain(under: Under, how: Callable[[Any], Any]) -> None:
    under.plan = FUSED
    net = model()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    train(net, optimizer, steps=5)
    assert b"autofit" not in pickle.dumps(optimizer)
    under.plan = Plan()
    twin, other = how((net, optimizer))
    assert type(other) is AdamW
    assert same(other.state_dict(), optimizer.state_dict())
    under.plan = FUSED
    train(net, optimizer, start=5)
    train(twin, other, start=5)
    assert torch.equal(weights(twin), weights(net))


def test_an_optimizer_is_freed_with_the_script_s_last_reference(under: Under) -> None:
    for plan in (FUSED, EIGHT_BIT):
        under.plan = plan
        net = model(torch.float32)
        optimizer = AdamW(net.parameters(), lr=1e-2)
        train(net, optimizer, steps=2)
        reference = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert reference() is None


def test_counters_are_placed_each_by_itself(under: Under) -> None:
    """In backward some parameters step alone: the first has its counter there, others have not."""
    under.plan = FUSED
    net = model(torch.float32)
    optimizer = AdamW(net.parameters(), lr=1e-2)
    train(net, optimizer, steps=1)
    first, *others = (optimizer.state[p] for p in net.parameters())
    for state in others:
        state["step"] = state["step"].double()
    assert first["step"].dtype is torch.float32
    train(net, optimizer, steps=1)
    assert {state["step"].dtype for state in (first, *others)} == {torch.float32}


def test_an_error_in_a_step_leaves_the_flags_as_they_were(
    under: Under, monkeypatch: pytest.MonkeyPatch
) -> None:
    under.plan = FUSED
    net = model()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    train(net, optimizer, steps=1)

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(torch, "_fused_adamw_", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        train(net, optimizer, steps=1)
    assert {group["fused"] for group in optimizer.param_groups} == {None}
    assert {group["foreach"] for group in optimizer.param_groups} == {None}


def test_torch_is_left_as_it_was() -> None:
    before = vars(Adam)["step"], Optimizer.load_state_dict, Optimizer._patch_step_function
    optimizers = Optimizers(Under())
    optimizers.attach()
    net = model()
    optimizer = Adam(net.parameters())
    assert getattr(Adam.step, "hooked", False)
    optimizers.detach()
    after = vars(Adam)["step"], Optimizer.load_state_dict, Optimizer._patch_step_function
    assert after[1:] == before[1:]
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    train(net, optimizer, steps=2)
    assert stepped == [1, 1]


class Block(nn.Module):
    """A residual block with weights large enough for 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        after: torch.Tensor = x + self.mlp(x)
        return after


def blocks() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Sequential(*(Block() for _ in range(3))), nn.Linear(WIDTH, 1))


ON_ROOT = {
    "precision": ("bf16",),
    "checkpointing": ("2", "all"),
    "micro_batch": ("8",),
}


@pytest.mark.parametrize("level", ["eight_bit", pytest.param("fused", marks=pytest.mark.full)])
@pytest.mark.parametrize("other", [(name, each) for name in ON_ROOT for each in ON_ROOT[name]])
def test_it_stands_beside_what_changes_the_model(
    under: Under, level: str, other: tuple[str, str]
) -> None:
    plan = Plan.of({"optimizer": level, other[0]: other[1]})
    plain, changed = blocks(), blocks()
    start = weights(plain)
    calls = Calls()
    root = HarnessRoot(changed, Seams(Bystander()), calls, lambda *args: False)
    try:
        for net, call, now in ((plain, plain, Plan()), (changed, root, plan)):
            under.plan, under.roots = now, (net,)
            optimizer = AdamW(net.parameters(), lr=1e-3)
            if call is root:
                root.apply(now)
            for step in range(5):
                optimizer.zero_grad()
                x = batch(step, torch.float32)
                y = root.running(x) if call is root else plain(x)
                (y.squeeze(-1) - x.mean(-1)).pow(2).mean().backward()
                optimizer.step()
    finally:
        root.take_back()
        calls.clear()
    learned = weights(plain) - start
    tolerance = 1e-2 if plan.fidelity() is Fidelity.EXACT else 0.3
    assert float((weights(changed) - weights(plain)).norm() / learned.norm()) < tolerance


# --- refusals -------------------------------------------------------------------------------


class Own(AdamW):
    """A class of the script's own."""


REFUSED: list[tuple[Plan, Make, str]] = [
    (FUSED, lambda net: Own(net.parameters()), "Own has no fused implementation"),
    (FUSED, lambda net: torch.optim.RMSprop(net.parameters()), "RMSprop has no fused"),
    (FUSED, lambda net: Adam(net.parameters(), differentiable=True), "differentiable=True"),
    (EIGHT_BIT, lambda net: SGD(net.parameters(), lr=0.1), "SGD has no 8-bit implementation"),
    (EIGHT_BIT, lambda net: Own(net.parameters()), "Own has no 8-bit implementation"),
    (EIGHT_BIT, lambda net: Adam(net.parameters(), amsgrad=True), "with amsgrad"),
    (EIGHT_BIT, lambda net: Adam(net.parameters(), maximize=True), "with maximize"),
    (EIGHT_BIT, lambda net: Adam(net.parameters(), lr=torch.tensor(0.1)), "rate is a tensor"),
    (EIGHT_BIT, lambda net: Adam(net.double().parameters()), "a parameter is float64"),
]


@pytest.mark.parametrize(("plan", "make", "reason"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_is_not_the_same_algorithm_is_refused(
    under: Under, plan: Plan, make: Make, reason: str
) -> None:
    under.plan = plan
    net = model(torch.float32)
    optimizer = make(net)
    with pytest.raises(Refused, match=reason) as caught:
        train(net, optimizer, steps=1)
    assert caught.value.strategy == "optimizer"
    assert not optimizer._optimizer_state_dict_post_hooks


def test_sparse_gradients_are_refused(under: Under) -> None:
    under.plan = FUSED
    table = nn.Embedding(8, 4, sparse=True)
    optimizer = SGD(table.parameters(), lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(Refused, match="sparse"):
        optimizer.step()


def test_what_the_script_has_fused_itself_is_left_alone(under: Under) -> None:
    under.plan = FUSED
    net = model()
    optimizer = AdamW(net.parameters(), lr=1e-2, fused=True)
    train(net, optimizer, steps=2)
    assert not optimizer._optimizer_state_dict_post_hooks
    assert {group["fused"] for group in optimizer.param_groups} == {True}


def test_the_handle_keeps_no_optimizer_alive() -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    handle = HarnessOptimizer(optimizer, Under())
    assert handle.optimizer is optimizer
    assert fused.why_not(optimizer) is None
    del optimizer
    gc.collect()
    with pytest.raises(AssertionError):
        _ = handle.optimizer
