"""Gradients and optimizer state in host memory: the same updates, fewer bytes on the card."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from autofit.plan import Plan
from autofit.strategies.optimizer_offload import host_steps
from autofit.worker.harness.patching.observers import Calls
from autofit.worker.harness.session.root import HarnessRoot
from tests.strategies.optimizers import Under, owned, same, saved

pytestmark = pytest.mark.gpu

WIDTH = 1024
LAYERS = 24
STEPS = 6
MIB = 1 << 20
RELEASED, STREAMED = {"gradient_release": "released"}, {"optimizer_offload": "streamed"}
HOSTED = {"gradient_release": "hosted", "micro_batch": "8"}


@pytest.fixture
def under() -> Iterator[Under]:
    """Every optimizer steps under its ``plan``."""
    with owned() as owner:
        yield owner


def model() -> nn.Module:
    torch.manual_seed(5)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)  # so many others would answer every sample alike
    return nn.Sequential(*layers).to("cuda")


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda net: AdamW(net.parameters(), lr=1e-3),
    "amsgrad": lambda net: Adam(net.parameters(), lr=1e-3, amsgrad=True),
    "sgd": lambda net: SGD(net.parameters(), lr=0.05, momentum=0.9),
}


class Trained:
    """A model trained under a plan, as a session does it, and what that took."""

    def __init__(self, under: Under, levels: dict[str, str], kind: str = "adamw") -> None:
        self.net = model()
        self.optimizer: Optimizer = OPTIMIZERS[kind](self.net)
        self.plan = under.plan = Plan.of(levels)
        self._under = under
        self._calls = Calls()
        self._root = HarnessRoot(self.net, under.seams, self._calls, lambda *args: False)
        under.roots = (self.net,)
        self._root.apply(self.plan)
        self.peak = self.between = 0

    def train(self, start: int = 0, steps: int = STEPS) -> Trained:
        for step in range(start, start + steps):
            self.optimizer.zero_grad()
            self._under.optimizers.prepare()
            x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
            torch.cuda.reset_peak_memory_stats()
            (self._root.running(x) - x).square().mean().backward()
            self.optimizer.step()
            self.peak = torch.cuda.max_memory_allocated()
        self.optimizer.zero_grad()
        self.between = torch.cuda.memory_allocated()
        return self

    def turn(self, levels: dict[str, str]) -> None:
        self.plan = self._under.plan = Plan.of(levels)
        self._root.apply(self.plan)

    def end(self) -> None:
        self._under.plan = Plan()
        self._under.optimizers.prepare()
        self._root.take_back()
        self._calls.clear()

    def weights(self) -> torch.Tensor:
        return torch.cat(
            [value.flatten().float().cpu() for value in self.net.state_dict().values()]
        )


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("fused", ["as_is", "fused"])
@pytest.mark.parametrize(
    "levels",
    [RELEASED, STREAMED, RELEASED | STREAMED, HOSTED, HOSTED | STREAMED],
    ids=lambda levels: "+".join(levels.values()),
)
def test_it_is_the_same_training(
    under: Under, kind: str, fused: str, levels: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_steps, "PIECE", 300_000)
    plain = Trained(under, {}, kind).train()
    plain.end()
    changed = Trained(under, levels | {"optimizer": fused}, kind).train()
    moved = (plain.weights() - Trained(under, {}).weights()).norm()
    assert moved > 0
    assert (changed.weights() - plain.weights()).norm() < 5e-3 * moved
    checkpoint = saved(changed.optimizer.state_dict())
    expected = plain.optimizer.state_dict()
    for index, state in expected["state"].items():
        for name, value in state.items():
            found = checkpoint["state"][index][name]
            assert torch.allclose(found.cpu(), value.cpu(), rtol=1e-2, atol=1e-6), name
    changed.end()


def test_steps_in_backward_after_steps_of_all(under: Under) -> None:
    """Counters that the fused kernels want on the card were left in host memory by those."""
    fused = {"optimizer": "fused"}
    plain = Trained(under, fused).train(steps=4)
    plain.end()
    changed = Trained(under, {}).train(steps=2)
    changed.turn(fused)
    changed.turn(RELEASED | fused)
    changed.train(start=2, steps=2)
    moved = (plain.weights() - Trained(under, {}).weights()).norm()
    assert (changed.weights() - plain.weights()).norm() < 5e-3 * moved
    changed.end()


@pytest.mark.parametrize("fused", ["as_is", "fused"])
def test_a_step_taken_beside_the_computation_reads_nothing_too_early(
    under: Under, fused: str
) -> None:
    """Many steps on end, one beside the next layer's backward: to the last bit."""
    beside = RELEASED | {"optimizer": fused}
    plain = Trained(under, beside).train(steps=40)
    plain.end()
    changed = Trained(under, beside | STREAMED).train(steps=40)
    assert torch.equal(changed.weights(), plain.weights())
    plain_state = plain.optimizer.state_dict()["state"]
    found = changed.optimizer.state_dict()["state"]
    for index, state in plain_state.items():
        assert torch.equal(found[index]["exp_avg_sq"].cpu(), state["exp_avg_sq"].cpu())
    changed.end()


def test_what_was_saved_is_loaded_without_the_card(under: Under) -> None:
    first = Trained(under, STREAMED).train()
    document = saved(first.optimizer.state_dict())
    first.end()
    other = Trained(under, STREAMED)
    before = torch.cuda.memory_allocated()
    other.optimizer.load_state_dict(document)
    assert torch.cuda.memory_allocated() - before < MIB
    assert same(saved(other.optimizer.state_dict()), document)
    moments = [
        v for state in other.optimizer.state.values() for v in state.values() if v.dim() == 2
    ]
    assert len(moments) == 2 * LAYERS
    assert all(moment.is_pinned() for moment in moments)
    other.end()


def test_it_takes_fewer_bytes_of_the_card(under: Under) -> None:
    size = LAYERS * WIDTH * WIDTH * 4
    found = {}
    for name, levels in {
        "plain": {"optimizer": "fused"},
        "released": RELEASED | {"optimizer": "fused"},
        "streamed": STREAMED | {"optimizer": "fused"},
        "both": RELEASED | STREAMED | {"optimizer": "fused"},
        "parts": {"micro_batch": "8", "optimizer": "fused"} | STREAMED,
        "hosted": HOSTED | STREAMED | {"optimizer": "fused"},
    }.items():
        gc.collect()  # the one before
        held = torch.cuda.memory_allocated()
        trained = Trained(under, levels).train()
        found[name] = trained.peak - held, trained.between - held
        trained.end()
        del trained
    peak = {name: each[0] / size for name, each in found.items()}
    between = {name: each[1] / size for name, each in found.items()}
    assert peak["plain"] > 3.9, peak
    assert peak["released"] < 3.5, peak
    assert between["plain"] > 2.9
    assert between["streamed"] < 1.1, "weights alone"
    assert peak["both"] < 2.0, "weights, and a few layers' gradients and state under way"
    assert peak["hosted"] < peak["parts"], peak


def test_masters_and_state_on_the_host(under: Under) -> None:
    size = LAYERS * WIDTH * WIDTH * 4
    held = torch.cuda.memory_allocated()
    plain = Trained(under, RELEASED | {"weights": "bf16_master", "optimizer": "fused"}).train()
    plain.end()
    expected = plain.weights()
    del plain
    levels = RELEASED | STREAMED | {"weights": "bf16_master", "optimizer": "fused"}
    trained = Trained(under, levels).train()
    assert trained.between - held < 0.6 * size, "half of the weights"
    assert torch.equal(trained.weights(), expected)
    trained.end()


WORK = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(24))).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(60):
    x = torch.randn(64, 4096, device="cuda")
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("only", "memory", "picked"),
    [
        (("optimizer_offload",), "4.9GiB", {"optimizer_offload": "streamed"}),
        (
            ("optimizer_offload", "gradient_release"),
            "3.6GiB",
            {"optimizer_offload": "streamed", "gradient_release": "released"},
        ),
    ],
    ids=["state", "state and gradients"],
)
def test_a_search_picks_it(
    only: tuple[str, ...], memory: str, picked: dict[str, str], tmp_path: Path
) -> None:
    """1.5 GiB of weights, as much of gradients, twice as much of state."""
    (tmp_path / "train.py").write_text(WORK)
    options = [word for name in only for word in ("--only", name)]
    command = [sys.executable, "-m", "autofit", "search", "train.py", "--memory", memory, "--json"]
    ran = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)["plan"]
    assert {name: found[name] for name in picked} == picked
