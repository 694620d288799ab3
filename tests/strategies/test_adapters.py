"""LoRA in place: only adapters train, with the settings that their layers' weights had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from autofit.exceptions import Refused
from autofit.facts import Hardware
from autofit.plan import Plan
from autofit.strategies import Fidelity, get
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.patching.optimizers import Optimizers
from autofit.worker.harness.session.root import HarnessRoot
from tests.roots import Bystander

CPU = Hardware(device="cpu", name="CPU", total_bytes=1 << 33)
pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
]
LEVELS = ["lora", "qlora"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x).squeeze(-1)
        return out


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Conv1d(2, 2, 1)


class Script:
    """Owns the optimizers, and the root under the plan."""

    def __init__(self, calls: Calls) -> None:
        self.plan = Plan()
        self.seams = Seams(Bystander())
        self.roots: tuple[nn.Module, ...] = ()
        self.calls = calls

    def optimizer_plan(self) -> Plan:
        return self.plan

    def optimizer_refused(self, refusal: Refused) -> None:
        raise refusal

    def optimizer_broke(self, error: Exception) -> bool:
        return False

    def modules(self) -> tuple[nn.Module, ...]:
        return self.roots

    def root(self, module: nn.Module, **levels: str) -> Callable[[torch.Tensor], torch.Tensor]:
        self.plan, self.roots = Plan.of(levels), (module,)
        held = HarnessRoot(module, self.seams, self.calls, lambda *args: False)
        held.apply(self.plan)
        held.apply(self.plan)  # as with every other size of a part of the batch
        return lambda x: held.running(x)


@pytest.fixture
def script() -> Iterator[Script]:
    """Every optimizer steps under its plan."""
    owner = Script(Calls())
    optimizers = Optimizers(owner)
    optimizers.attach()
    yield owner
    optimizers.detach()
    owner.calls.clear()


def grouped(net: nn.Module) -> AdamW:
    """Return two groups, as scripts make them: no decay for biases."""
    weights = [p for p in net.parameters() if p.dim() > 1]
    biases = [p for p in net.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": weights},
        {"params": biases, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=1e-2)


def train(call: Callable[..., torch.Tensor], optimizer: Optimizer, steps: int) -> list[float]:
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        x = torch.randn(32, 64, generator=generator)
        optimizer.zero_grad()
        loss = (call(x) - x.mean(-1)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", [{}, {"micro_batch": "8", "checkpointing": "all"}], ids=str)
def test_only_adapters_train(script: Script, level: str, split: dict[str, str]) -> None:
    net = Net()
    optimizer = grouped(net)
    state = torch.get_rng_state()
    call = script.root(net, adapters=level, **split)
    assert torch.equal(torch.get_rng_state(), state)
    before = {name: value.clone() for name, value in net.state_dict().items() if _is_tensor(value)}
    losses = train(call, optimizer, 40)
    assert losses[-1] < 0.7 * losses[0]
    moved = {n for n, value in net.state_dict().items() if _moved(value, before[n])}
    assert moved == {n for n, p in net.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in moved)
    assert len(moved) == 3 * 2 * 2


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _moved(value: torch.Tensor, before: torch.Tensor) -> bool:
    return not torch.equal(value, before)


@pytest.mark.parametrize("level", LEVELS)
def test_the_scripts_optimizer_holds_them_in_the_same_groups(script: Script, level: str) -> None:
    net = Net()
    optimizer = grouped(net)
    train(net, optimizer, 2)
    call = script.root(net, adapters=level)
    train(call, optimizer, 2)
    weights, biases = optimizer.param_groups
    trained = [p for p in net.parameters() if p.requires_grad]
    assert {id(p) for p in weights["params"]} == {id(p) for p in trained}
    assert biases["params"] == []
    assert (weights["weight_decay"], biases["weight_decay"]) == (0.01, 0.0)
    assert set(optimizer.state) == set(trained)
    assert len(optimizer.state_dict()["state"]) == len(trained)


def test_it_starts_where_the_model_is(script: Script) -> None:
    net, x = Net(), torch.randn(4, 64)
    expected = net(x).detach()
    call = script.root(net, adapters="lora")
    assert torch.allclose(call(x).detach(), expected, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_adapters_of_a_model_in_half_precision_are_in_float32(script: Script, level: str) -> None:
    """Their small steps would be lost, as peft itself says of those that it makes."""
    net = Net().bfloat16()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    call = script.root(net, adapters=level)
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    for _ in range(2):
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert call(x).dtype is torch.bfloat16
    trained = {p for p in net.parameters() if p.requires_grad}
    assert {p.dtype for p in trained} == {torch.float32}
    assert set(optimizer.state) == trained


def test_four_bits_take_an_eighth(script: Script) -> None:
    net = Net()
    held = [p for block in net.blocks for p in block.parameters() if p.dim() > 1]
    before = sum(p.nbytes for p in held)
    script.root(net, adapters="qlora")
    assert sum(p.nbytes for p in held) == 0, "the optimizer holds them until its first step"
    coded = [p for p in net.parameters() if p.dtype is torch.uint8]
    assert sum(p.nbytes for p in coded) == before // 8


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("beside", [{"optimizer": "fused"}, {"weights": "bf16"}], ids=str)
def test_beside_other_techniques(script: Script, level: str, beside: dict[str, str]) -> None:
    net = Net()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    losses = train(script.root(net, adapters=level, **beside), optimizer, 40)
    assert losses[-1] < 0.8 * losses[0]


def test_what_is_refused_and_said(script: Script) -> None:
    convolutions = nn.Sequential(*(Convolution() for _ in range(2)))
    with pytest.raises(Refused, match="no linear layers"):
        script.root(convolutions, adapters="lora")
    adapters = get("adapters")
    assert Plan.of({"adapters": "lora"}).fidelity() is Fidelity.RECIPE
    assert Plan.of({"adapters": "lora"}).fixed == Plan.of({"adapters": "lora"})
    assert adapters.unavailable("lora", CPU) is None
