"""Weights in bfloat16: float32 updates from two halves, or bf16 throughout, right on average."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import Facts, Fidelity, get
from autofit.strategies.support import in_float32
from autofit.strategies.weights import bf16, split_float32, while_made
from autofit.worker.harness.patching.observers import Calls, Process, Seams
from autofit.worker.harness.patching.optimizers import Optimizers
from autofit.worker.harness.session import script_facts as learn
from autofit.worker.harness.session.root import HarnessRoot
from tests.roots import Bystander
from tests.strategies import sessions

pytestmark = pytest.mark.quick

MASTERS = Plan.of({"weights": "bf16_master"})
PURE = Plan.of({"weights": "bf16"})
WIDTH = 96
STEPS = 12


class Script:
    """A small training, as a script has it, under a plan of the harness."""

    def __init__(self, optimizers: Optimizers, plan: Plan) -> None:
        self.seams = Seams(Bystander())
        self.roots: tuple[nn.Module, ...] = ()
        self.plan = plan
        self.calls = Calls()
        optimizers._owner = self

    def optimizer_plan(self) -> Plan:
        return self.plan

    def optimizer_refused(self, refusal: Refused) -> None:
        raise refusal

    def optimizer_broke(self, error: Exception) -> bool:
        return False

    def modules(self) -> tuple[nn.Module, ...]:
        return self.roots

    def root(self, module: nn.Module) -> HarnessRoot:
        """Return the harness's root of ``module``, with the plan applied."""
        held = HarnessRoot(module, self.seams, self.calls, lambda *args: False)
        held.apply(self.plan)
        self.roots = (*self.roots, module)
        self.held = held
        return held


@pytest.fixture
def under() -> Iterator[Callable[[Plan], Script]]:
    """Every optimizer steps under the plan of the script that is made last."""
    owner: Any = None
    optimizers = Optimizers(owner)
    made: list[Script] = []

    def make(plan: Plan) -> Script:
        made.append(Script(optimizers, plan))
        return made[-1]

    make(Plan())
    optimizers.attach()
    yield make
    optimizers.detach()
    for script in made:
        if hasattr(script, "held"):
            script.held.take_back()
        script.calls.clear()


def model() -> nn.Sequential:
    torch.manual_seed(5)
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    return nn.Sequential(*layers)


def backward(call: Callable[..., torch.Tensor], step: int) -> torch.Tensor:
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = (call(x).squeeze(-1) - x.mean(-1)).pow(2).mean()
    loss.backward()
    return loss.detach()


def train(
    call: Callable[..., torch.Tensor], optimizer: Optimizer, start: int = 0, steps: int = STEPS
) -> list[float]:
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
    losses = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        losses.append(float(backward(call, step)))
        optimizer.step()
        schedule.step()
    return losses


def called(held: HarnessRoot) -> Callable[..., torch.Tensor]:
    return lambda x: held.running(x)


def values(module: nn.Module) -> torch.Tensor:
    shown = module.state_dict()
    return torch.cat([shown[n].flatten().double() for n, _ in module.named_parameters()])


def apart(one: nn.Module, other: nn.Module) -> float:
    """Return how far two models are apart, relative to what the second has learned."""
    learned = values(other) - values(model())
    return float((values(one) - values(other)).norm() / learned.norm())


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda net: SGD(net.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda net: Adam(net.parameters(), lr=1e-3, weight_decay=0.1),
    "adamw": lambda net: AdamW(
        [{"params": [p for p in net.parameters() if p.dim() == d]} for d in (1, 2)], lr=1e-3
    ),
}


# --- halves -------------------------------------------------------------------------------------


def test_two_halves_are_the_weight() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), dtype=torch.int64, generator=generator)
    x = x.to(torch.int32).view(torch.float32)
    x = x[x.isfinite() & (x.abs() > 2.0**-100)]
    upper, rest = split_float32.halves(x)
    assert upper.dtype is torch.bfloat16
    assert torch.equal(upper, x.to(torch.bfloat16))
    joined = split_float32.whole(upper, rest)
    off = joined.view(torch.int32) != x.view(torch.int32)
    assert float(off.float().mean()) < 1e-4  # ties that round down
    assert float(((joined - x) / x).abs().max()) < 2.0**-22


def test_what_is_no_number_stays_so_and_zero_stays_zero() -> None:
    nan = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    odd = torch.cat([nan, torch.tensor([float("inf"), float("-inf"), 0.0, -0.0, 3.4e38])])
    upper, rest = split_float32.halves(odd)
    joined = split_float32.whole(upper, rest)
    assert torch.equal(joined.isnan(), odd.isnan())
    assert torch.equal(joined[3:], odd[3:])
    pruned = split_float32.whole(
        torch.zeros(2, dtype=torch.bfloat16), torch.tensor([-5, 5]).short()
    )
    assert torch.equal(pruned, torch.zeros(2))


# --- float32 updates ----------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1, 1 << 26])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_same_training_within_rounding(
    under: Callable[[Plan], Script], kind: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_float32, "TOGETHER", together)
    plain = model()
    expected = train(plain, OPTIMIZERS[kind](plain))
    script, net = under(MASTERS), model()
    optimizer = OPTIMIZERS[kind](net)
    held = script.root(net)
    assert all(p.dtype is torch.bfloat16 for p in net.parameters())
    found = train(called(held), optimizer)
    assert apart(net, plain) < 0.1
    assert found == pytest.approx(expected, rel=0.05)
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {torch.bfloat16}
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        len(group["params"]) for group in OPTIMIZERS[kind](model()).param_groups
    ]


def test_an_update_is_float32s_to_the_last_bit(under: Callable[[Plan], Script]) -> None:
    """From the same gradients; updates far below what bfloat16 can hold are not lost."""
    plain = model()
    script, net = under(MASTERS), model()
    optimizer = Adam(net.parameters(), lr=1e-6)
    held = script.root(net)
    theirs = Adam(plain.parameters(), lr=1e-6, foreach=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(called(held), step)
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            other.grad = mine.grad.float()
        optimizer.step()
        theirs.step()
    assert float((values(net) - values(plain)).abs().max()) < 1e-8
    states = [optimizer.state[p]["exp_avg"].dtype for p in net.parameters()]
    assert set(states) == {torch.float32}
    rounded = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert torch.equal(rounded, values(net).to(torch.bfloat16))


def test_it_takes_no_more_bytes_for_weights_and_half_for_gradients(
    under: Callable[[Plan], Script],
) -> None:
    net = model()
    whole = sum(p.nbytes for p in net.parameters())
    held = under(MASTERS).root(net)
    backward(called(held), 0)
    rests = [split_float32.rest_of(p) for p in net.parameters()]
    assert sum(p.nbytes for p in net.parameters()) == whole // 2
    assert sum(rest.nbytes for rest in rests if rest is not None) == whole // 2
    assert sum(p.grad.nbytes for p in net.parameters() if p.grad is not None) == whole // 2


def test_taken_back_it_goes_on_in_float32(under: Callable[[Plan], Script]) -> None:
    script, net = under(MASTERS), model()
    optimizer = Adam(net.parameters(), lr=1e-3)
    held = script.root(net)
    train(called(held), optimizer)
    before = values(net)
    script.plan = Plan()
    held.take_back()
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {torch.float32}
    assert torch.equal(values(net), before)
    train(net, optimizer, STEPS)
    assert not any(split_float32.rest_of(p) is not None for p in net.parameters())
    assert "_in_float32" not in repr(nn.Module.state_dict)


def test_what_is_saved_is_float32(under: Callable[[Plan], Script]) -> None:
    net = model()
    net[2].weight = net.get_parameter("0.weight")  # tied, as embeddings are
    plain = copy.deepcopy(net)
    script = under(MASTERS)
    optimizer = AdamW(net.parameters(), lr=1e-3)
    held = script.root(net)
    saved = net.state_dict()
    assert saved.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(saved[name], value), name
    assert saved["0.weight"].data_ptr() == saved["2.weight"].data_ptr()
    train(called(held), optimizer)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(values(other), values(net))
        assert {p.dtype for p in other.parameters()} == {torch.float32}
        assert other[2].weight is other[0].weight
    assert all(
        value.dtype is torch.float32
        for state in optimizer.state_dict()["state"].values()
        for value in state.values()
    )


def test_resumed_it_goes_on_as_if_nothing_had_been(under: Callable[[Plan], Script]) -> None:
    script, net = under(MASTERS), model()
    optimizer = Adam(net.parameters(), lr=1e-3)
    train(called(script.root(net)), optimizer, steps=4)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    later = backward_only(script.held, optimizer, 4)
    file.seek(0)
    saved = torch.load(file)
    again, other = under(MASTERS), model()
    resumed = Adam(other.parameters(), lr=1.0)
    held = again.root(other)  # met before it loads: the hardest order
    other.load_state_dict(saved["net"])
    resumed.load_state_dict(saved["optimizer"])
    assert backward_only(held, resumed, 4) == later
    assert torch.equal(values(other), values(net))


def backward_only(held: HarnessRoot, optimizer: Optimizer, start: int) -> list[float]:
    losses = []
    for step in range(start, start + 4):
        optimizer.zero_grad()
        losses.append(float(backward(called(held), step)))
        optimizer.step()
    return losses


def test_what_the_script_writes_into_a_weight_stands(under: Callable[[Plan], Script]) -> None:
    script, net = under(MASTERS), model()
    optimizer = SGD(net.parameters(), lr=0.01)
    held = script.root(net)
    train(called(held), optimizer, steps=2)
    first, last = net.get_parameter("0.weight"), net.get_parameter("3.weight")
    first.data.mul_(0.5)
    last.data.zero_()
    half = values(net)
    with torch.no_grad():
        last.add_(1.0)
    optimizer.zero_grad()
    optimizer.step()
    backward(called(held), 2)
    optimizer.step()
    moved = float((values(net) - half).abs().max())
    assert 0.9 < moved < 1.1


def test_what_is_thawed_later_is_split_then(under: Callable[[Plan], Script]) -> None:
    script, net = under(MASTERS), model()
    net[0].requires_grad_(False)
    optimizer = SGD(net.parameters(), lr=0.01)
    held = script.root(net)
    train(called(held), optimizer, steps=1)
    assert net[0].weight.dtype is torch.float32
    net[0].requires_grad_(True)
    train(called(held), optimizer, steps=1)
    assert net[0].weight.dtype is torch.bfloat16
    assert net[0].weight.grad is not None


@pytest.mark.parametrize("level", ["fused", "eight_bit"])
def test_beside_another_implementation_of_the_optimizer(
    under: Callable[[Plan], Script], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_float32, "TOGETHER", WIDTH * WIDTH)
    plain = model()
    train(plain, Adam(plain.parameters(), lr=1e-3))
    script, net = under(MASTERS.replace(optimizer=level)), model()
    optimizer = Adam(net.parameters(), lr=1e-3)
    train(called(script.root(net)), optimizer)
    assert apart(net, plain) < 0.15
    codes = [p for p in net.parameters() if "exp_avg_codes" in optimizer.state[p]]
    assert len(codes) == (2 if level == "eight_bit" else 0)
    assert all(
        value.dtype is torch.float32
        for state in optimizer.state_dict()["state"].values()
        for value in state.values()
    )


class Positioned(nn.Module):
    """Normalises words with a buffer of float32 added to them."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(32, 16), body, nn.Linear(16, 32)
        self.register_buffer("positions", torch.randn(8, 1, 16))

    def forward(self, words: torch.Tensor) -> Any:
        return self.head(self.body(self.embed(words) + self.positions))


class Normalising(nn.Module):
    """Normalises without a module for it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (16,), self.weight)


def encoder(first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, norm_first=first)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.GroupNorm(4, 4), layers)


def losses_of(body: Callable[[], nn.Module]) -> list[float]:
    torch.manual_seed(0)
    model = Positioned(body())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(3):
        words = torch.randint(32, (8, 4))
        loss = functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("level", ["bf16_master", "bf16"])
@pytest.mark.parametrize("first", [False, True])
def test_what_normalises_numbers_of_float32(first: bool, level: str) -> None:
    """The CPU's kernels take no weights in bf16 there."""
    body = partial(encoder, first)
    expected = losses_of(body)
    with sessions.under(Plan.of({"weights": level, "checkpointing": "all"})):
        assert losses_of(body) == pytest.approx(expected, rel=5e-3)


def test_what_normalises_without_a_module_is_refused_by_its_name() -> None:
    with sessions.under(MASTERS), pytest.raises(Refused, match="mixed dtype") as refused:
        losses_of(Normalising)
    assert refused.value.strategy == "weights"


def test_weights_that_the_script_steps_by_hand_have_no_masters() -> None:
    """As meta-learning does in its inner loop."""
    strategy, by_hand = get("weights"), Facts(autograd_grad=True)
    assert "torch.autograd.grad" in (strategy.inapplicable("bf16_master", by_hand) or "")
    assert strategy.inapplicable("bf16", by_hand) is None


@pytest.mark.parametrize("level", ["bf16_master", "bf16"])
def test_what_is_refused(under: Callable[[Plan], Script], level: str) -> None:
    plan = Plan.of({"weights": level})
    with pytest.raises(Refused, match="no trainable weight is float32"):
        under(plan).root(model().double())
    shared = model()
    shared[2].weight = nn.Parameter(shared.get_parameter("0.weight").data)
    with pytest.raises(Refused, match="two parameters share their memory"):
        under(plan).root(shared)
    script, net = under(plan), model()
    held = script.root(net)
    optimizer = LBFGS(net.parameters())
    backward(called(held), 0)
    with pytest.raises(Refused, match="LBFGS calls the model"):
        optimizer.step(lambda: backward(called(held), 0))


# --- while the model is made ---------------------------------------------------------------------


@pytest.fixture
def short(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[float], while_made.SplitWhileMade]]:
    """A device that holds so many times the model's own bytes."""
    watching = while_made.SplitWhileMade(Process(Seams(Bystander()), {}, lambda: lambda: None))
    whole = sum(parameter.nbytes for parameter in model().parameters())

    def make(times: float) -> while_made.SplitWhileMade:
        monkeypatch.setattr(while_made, "device_capacity", lambda device: int(times * whole))
        watching.attach()
        return watching

    yield make
    watching.detach()


@pytest.mark.parametrize("way", ["made there", "moved there"])
def test_a_model_that_would_fill_the_device_is_split_as_it_comes(
    under: Callable[[Plan], Script], short: Callable[[float], while_made.SplitWhileMade], way: str
) -> None:
    plain = model()
    if way == "made there":
        short(1.0)
        net = model()
    else:
        net = model()
        short(1.0)
        net.to("cpu")
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert {split_float32.type_of(p) for p in net.parameters()} == {torch.float32}
    script = under(MASTERS)
    held = script.root(net)
    if way == "moved there":  # with the values that it has: made there, others are drawn
        assert torch.equal(values(net), values(plain))
    losses = train(called(held), Adam(net.parameters(), lr=1e-3), steps=30)
    assert losses[-1] < 0.7 * losses[0]
    assert learn.describe(net, (torch.zeros(2, WIDTH),), {}).dtype == "float32"


def test_what_is_loaded_before_the_first_call_is_whole(
    under: Callable[[Plan], Script], short: Callable[[float], while_made.SplitWhileMade]
) -> None:
    saved = {name: value + 1e-3 for name, value in model().state_dict().items()}
    net = model()
    short(1.0)
    net.to("cpu")
    net.load_state_dict(saved)
    assert all(torch.equal(value, saved[name]) for name, value in net.state_dict().items())
    under(MASTERS).root(net)
    assert all(torch.equal(value, saved[name]) for name, value in net.state_dict().items())


def test_a_model_with_room_is_not_touched_before_its_first_call(
    short: Callable[[float], while_made.SplitWhileMade],
) -> None:
    short(4.0)
    net = model()
    assert {p.dtype for p in net.parameters()} == {torch.float32}


@pytest.mark.parametrize("weights", ["bf16_master", "bf16"])
def test_a_model_that_is_split_as_it_comes_takes_the_batch_as_it_is(
    weights: str, short: Callable[[float], while_made.SplitWhileMade]
) -> None:
    """The batch is float32: before a plan is applied, in proofs, in evaluation, and taken back."""
    short(1.0).detach()
    with sessions.under(Plan.of({"weights": weights, "micro_batch": "2"})) as session:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        x = torch.randn(4, WIDTH)
        assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
        with torch.no_grad():
            before = net(x)
        optimizer = Adam(net.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            (net(x) - 1).square().mean().backward()
            optimizer.step()
        assert session.roots[0].splits.chunked is not None
        assert not session.facts.autocast  # it is the plan's, not the script's
        with torch.no_grad():
            assert float(net(x).mean()) > float(before.mean())
        if weights == "bf16_master":
            session.roots[0].take_back()
            assert net(x).dtype == torch.float32  # no autocast is left


# --- bf16 throughout ----------------------------------------------------------------------------


def test_stochastic_rounding_keeps_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.full((1 << 16,), 1.0 + 2.0**-10)
    rounded = bf16.stochastic(x, generator)
    assert set(rounded.unique().tolist()) == {1.0, 1.0078125}
    assert float(rounded.double().mean()) == pytest.approx(1.0 + 2.0**-10, abs=5e-5)
    odd = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -2.0])
    kept = bf16.stochastic(odd, generator)
    assert torch.equal(kept.isnan(), odd.isnan())
    assert torch.equal(kept[[0, 1, 3, 4]].float(), odd[[0, 1, 3, 4]])


def test_pure_bf16_learns_where_rounding_to_nearest_stands_still(
    under: Callable[[Plan], Script],
) -> None:
    """Updates a tenth of the distance between two bfloat16 numbers, all in one direction."""
    script, net = under(PURE), nn.Linear(64, 64, bias=False)
    torch.nn.init.ones_(net.weight)
    optimizer = SGD(net.parameters(), lr=1.0)
    held = script.root(net)
    state = torch.get_rng_state()
    for _ in range(40):
        optimizer.zero_grad()
        held.running(torch.ones(1, 64))
        net.weight.grad = torch.full_like(net.weight, 0.0004)
        optimizer.step()
    assert torch.equal(torch.get_rng_state(), state)
    assert float(net.weight.detach().double().mean()) == pytest.approx(1 - 40 * 0.0004, abs=2e-3)


def test_pure_bf16_halves_what_is_kept_and_still_trains(under: Callable[[Plan], Script]) -> None:
    script, net = under(PURE), model()
    optimizer = Adam(net.parameters(), lr=1e-3)
    losses = train(called(script.root(net)), optimizer, steps=60)
    assert losses[-1] < 0.5 * losses[0]
    kept = {
        value.dtype
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    }
    assert kept == {torch.bfloat16}
    assert {value.dtype for value in net.state_dict().values()} == {torch.bfloat16}


def test_pure_bf16_is_another_recipe() -> None:
    assert PURE.fidelity() is Fidelity.RECIPE
    assert MASTERS.fidelity() is Fidelity.ROUNDING
    assert PURE.fixed == PURE
    assert MASTERS.fixed == Plan()
