"""The script's own optimizer computed otherwise: the same updates, checkpoints that interchange."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import Fidelity, _eight_bit, _fused
from autofit.worker.harness.optimizers import HarnessOptimizer, Optimizers
from autofit.worker.harness.roots import HarnessRoot
from autofit.worker.harness.seams import Calls, Seams

pytestmark = pytest.mark.quick

FUSED = Plan.of({"optimizer": "fused"})
EIGHT_BIT = Plan.of({"optimizer": "eight_bit"})
STEPS = 20
WIDTH = 96
"""Two layers of 9216 weights, above what stays in 32 bits, and biases below."""

Make = Callable[[nn.Module], Optimizer]


class Under:
    """Owns the optimizers of a test; refusals end it."""

    def __init__(self, *roots: nn.Module) -> None:
        self.plan = Plan()
        self.roots = roots

    def optimizer_plan(self) -> Plan:
        return self.plan

    def optimizer_refused(self, refusal: Refused) -> None:
        raise refusal

    def modules(self) -> tuple[nn.Module, ...]:
        return self.roots


@pytest.fixture
def under() -> Iterator[Under]:
    """Every optimizer steps under its ``plan``."""
    owner = Under()
    optimizers = Optimizers(owner)
    optimizers.attach()
    yield owner
    optimizers.detach()


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(5)
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    return nn.Sequential(*layers).to(dtype)


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Return two groups, as scripts make them: no decay for biases."""
    weights = [p for p in net.parameters() if p.dim() > 1]
    biases = [p for p in net.parameters() if p.dim() == 1]
    return [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0, "lr": 3e-3},
    ]


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda net: SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "sgd_plain": lambda net: SGD(groups(net), lr=0.05),
    "adam": lambda net: Adam(net.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95)),
    "adamw": lambda net: AdamW(groups(net), lr=1e-2),
    "amsgrad": lambda net: AdamW(net.parameters(), lr=1e-2, amsgrad=True, maximize=True),
    "foreach": lambda net: Adam(net.parameters(), lr=1e-2, foreach=True),
    "adagrad": lambda net: Adagrad(groups(net), lr=0.05, lr_decay=0.01),
}


def batch(step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def backward(net: nn.Module, step: int) -> torch.Tensor:
    x = batch(step, next(net.parameters()).dtype)
    loss: torch.Tensor = (net(x).squeeze(-1) - x.mean(-1)).pow(2).mean()
    loss.backward()
    return loss.detach()


def train(
    net: nn.Module, optimizer: Optimizer, start: int = 0, steps: int = STEPS
) -> list[torch.Tensor]:
    """Train as a simple script does, and return the losses."""
    losses = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        losses.append(backward(net, step))
        optimizer.step()
    return losses


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in net.parameters()])


def apart(one: nn.Module, other: nn.Module) -> float:
    """Return how far two models are apart, relative to what the second has learned."""
    learned = weights(other) - weights(model(next(other.parameters()).dtype))
    return float((weights(one) - weights(other)).norm() / learned.norm())


def exact(dtype: torch.dtype) -> float:
    return 1e-9 if dtype is torch.float64 else 1e-3


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


def rich(net: nn.Module, under: Under, plan: Plan) -> tuple[list[float], int]:
    """Train with all that scripts do around an optimizer; return the rates and closures called."""
    under.plan = plan
    first, *rest = net.parameters()
    parts: list[dict[str, Any]] = [{"params": [first]}, {"params": rest[:-1], "lr": 3e-3}]
    optimizer = AdamW(parts, lr=1e-2)
    warm_up = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    plateau = ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    rates, closures = [], 0

    def closure() -> torch.Tensor:
        nonlocal closures
        closures += 1
        assert torch.is_grad_enabled()
        optimizer.zero_grad(set_to_none=False)
        return backward(net, 100)

    for step in range(STEPS):
        if step == 10:
            optimizer.add_param_group({"params": rest[-1:], "weight_decay": 0.2})
        optimizer.zero_grad()
        for part in range(2):  # accumulation
            loss = backward(net, 2 * step + part)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        if step % 5 == 4:
            loss = optimizer.step(closure)
        else:
            scaler.step(optimizer)
            scaler.update()
        if step < 10:
            warm_up.step()
        else:
            plateau.step(float(loss.detach()))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates, closures


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


def same(one: Any, other: Any, tolerance: float = 1e-9) -> bool:
    """Return whether two documents are the same: keys, types, dtypes, devices, and numbers."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
            and torch.allclose(one, other, rtol=1e-6, atol=tolerance)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k], tolerance) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(
            same(a, b, tolerance) for a, b in zip(one, other, strict=True)
        )
    return type(one) is type(other) and bool(one == other)


def saved(document: Any) -> Any:
    """Return what comes back from a file."""
    file = io.BytesIO()
    torch.save(document, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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


class _Handler:
    """Accepts what the seams report."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: args[-1]() if name == "backward" else None


ON_ROOT = {
    "precision": ("bf16",),
    "checkpointing": ("half", "all"),
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
    root = HarnessRoot(changed, Seams(_Handler()), calls, lambda *args: False)
    try:
        for net, call, now in ((plain, plain, Plan()), (changed, root, plan)):
            under.plan, under.roots = now, (net,)
            optimizer = AdamW(net.parameters(), lr=1e-3)
            if call is root:
                root.apply(now)
            for step in range(5):
                optimizer.zero_grad()
                x = batch(step, torch.float32)
                y = root.call((x,), {}) if call is root else plain(x)
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
    (FUSED, lambda net: Adam(net.parameters(), differentiable=True), "is differentiable"),
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


# --- 8 bits ---------------------------------------------------------------------------------

ADAMS: dict[str, Make] = {
    "adam": lambda net: Adam(net.parameters(), lr=1e-3, weight_decay=0.1),
    "adamw": lambda net: AdamW(groups(net), lr=1e-3),
}


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of all tensors in the state."""
    tensors = (v for state in optimizer.state.values() for v in state.values())
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


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


def test_the_kernels_are_tried_before_they_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    _eight_bit.broken.cache_clear()
    cpu = torch.device("cpu")
    assert _eight_bit.broken(cpu, torch.float32) is None
    _eight_bit.broken.cache_clear()
    kernels = _eight_bit.bitsandbytes()
    monkeypatch.setattr(kernels, "optimizer_update_8bit_blockwise", lambda *_, **__: None)
    assert "compute something else" in (_eight_bit.broken(cpu, torch.float32) or "")
    _eight_bit.broken.cache_clear()


def test_codes_come_back_as_they_were() -> None:
    values = _eight_bit.maps(torch.device("cpu"))[0]
    row = torch.randn(1000)
    codes, scales = _eight_bit.quantise(row, values)
    once = _eight_bit.dequantise(codes, scales, values)
    again, _ = _eight_bit.quantise(once, values)
    assert torch.equal(again, codes)
    assert (once - row).norm() < 0.05 * row.norm()


def test_the_handle_keeps_no_optimizer_alive() -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    handle = HarnessOptimizer(optimizer, Under())
    assert handle.optimizer is optimizer
    assert _fused.why_not(optimizer) is None
    del optimizer
    gc.collect()
    with pytest.raises(AssertionError):
        _ = handle.optimizer
