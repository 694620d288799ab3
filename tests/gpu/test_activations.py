"""Activations on a card: recomputed, and sent to the host beside the computation."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from autofit.plan import Plan
from autofit.space.catalogue import clash
from autofit.strategies import Facts, Fidelity
from autofit.strategies.activation_offload import saved_tensors
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.session.root import HarnessRoot, RunPolicy
from autofit.worker.harness.verification.plan_check import prove
from autofit.worker.oom.classifier import ErrorKind, classify
from tests.roots import Bystander

pytestmark = pytest.mark.gpu

GIB = 1 << 30
WIDTH = 1024
EXACT = 1e-5
"""Relative: the order of sums in attention's backward is not always the same."""
ROUNDING = 0.05
BESIDE: list[dict[str, str]] = [
    {},
    {"precision": "bf16"},
    {"checkpointing": "all"},
    {"checkpointing": "2"},
    {"micro_batch": "6"},
    {"micro_batch": "6", "checkpointing": "all", "precision": "bf16"},
    {"compile": "regional"},
    {"compile": "full"},
    {"compile": "budget"},
]


class Block(nn.Module):
    """A decoder's block: 20 MiB or so are saved in it for a batch of 16."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(drop), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 16, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.drop if self.training else 0.0
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        after: torch.Tensor = x + self.mlp(self.norms[1](x))
        return after


class Decoder(nn.Module):
    """Twelve of them."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(drop) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(12, 256, WIDTH, device="cuda")


def root_of(module: nn.Module, calls: Calls) -> HarnessRoot:
    return HarnessRoot(
        module,
        Seams(Bystander()),
        calls,
        lambda *args: False,
        policy=RunPolicy(strict=True),
    )


def gradients(module: nn.Module, held: HarnessRoot, x: torch.Tensor) -> torch.Tensor:
    backward(module, held, x)
    return gathered(module)


def backward(module: nn.Module, held: HarnessRoot, x: torch.Tensor) -> None:
    torch.manual_seed(1)
    module.zero_grad()
    held.running(x).float().square().mean().backward()


def gathered(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in module.parameters() if p.grad is not None])


def peak(run: Callable[[], object]) -> int:
    """Return the bytes that ``run`` adds at its worst moment."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("beside", BESIDE, ids=lambda each: "+".join(each.values()) or "alone")
@pytest.mark.parametrize("level", ["half", "all"])
def test_offloaded_gradients_are_the_same(
    level: str, beside: dict[str, str], calls: Calls, x: torch.Tensor
) -> None:
    plan = Plan.of({"activation_offload": level, **beside})
    if reason := clash(plan):
        pytest.skip(reason)
    module = Decoder().cuda()
    held = root_of(module, calls)
    plain = gradients(module, held, x)
    prove(held, plan, (x,), {}, Facts())
    allowed = ROUNDING if plan.fidelity() is Fidelity.ROUNDING else EXACT
    for _ in range(4):  # the memory of one step is that of the next
        assert off(gradients(module, held, x), plain) < allowed
    held.take_back()


def test_copies_keep_apart_from_what_is_computed_meanwhile(
    calls: Calls, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small tensors travel too, memory is used again at once, backward is on another stream."""
    monkeypatch.setattr(saved_tensors, "SMALL", 1)
    module = Decoder(0.1).cuda()
    held = root_of(module, calls)
    plain = gradients(module, held, x)
    held.apply(Plan.of({"activation_offload": "all"}))
    side = torch.cuda.Stream()
    for step in range(12):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if step % 2 else torch.cuda.current_stream()):
            found = gradients(module, held, x)
            junk = [torch.full_like(x, float("nan")) for _ in range(8)]
            assert off(found, plain) < EXACT
            del junk
        torch.cuda.current_stream().wait_stream(side)
    held.take_back()


def test_it_holds_less_and_gives_the_host_its_memory_back(calls: Calls, x: torch.Tensor) -> None:
    module = Decoder().cuda()
    held = root_of(module, calls)
    peaks = {}
    for name, levels in {
        "as_is": {},
        "half": {"activation_offload": "half"},
        "all": {"activation_offload": "all"},
        "checkpointed": {"checkpointing": "all"},
        "both": {"checkpointing": "all", "activation_offload": "all"},
    }.items():
        held.apply(Plan.of(levels))
        gradients(module, held, x)
        peaks[name] = peak(lambda: held.running(x).square().mean().backward())
        held.take_back()
    assert peaks["half"] < 0.75 * peaks["as_is"], peaks
    assert peaks["all"] < 0.4 * peaks["as_is"], peaks
    assert peaks["both"] < peaks["checkpointed"], peaks
    pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    assert pinned < 64 << 20, "what is left is not of ours"


def test_it_waits_less_than_torchs_own(calls: Calls) -> None:
    """Copies beside the computation, against ``save_on_cpu``, which waits for each of them."""
    module = Decoder().cuda()
    x = torch.randn(32, 512, WIDTH, device="cuda")
    held = root_of(module, calls)

    def seconds(step: Callable[[], object]) -> float:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / 3

    def torchs() -> None:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            output = module(x)
        output.square().mean().backward()

    plain = seconds(lambda: held.running(x).square().mean().backward())
    theirs = seconds(torchs)
    held.apply(Plan.of({"activation_offload": "all"}))
    ours = seconds(lambda: held.running(x).square().mean().backward())
    held.take_back()
    held.apply(Plan.of({"activation_offload": "all", "checkpointing": "all"}))
    inputs = seconds(lambda: held.running(x).square().mean().backward())
    held.take_back()
    figures = {"plain": plain, "save_on_cpu": theirs, "offload": ours, "with checkpoints": inputs}
    print(json.dumps(figures))
    assert ours < 0.8 * theirs, figures
    assert inputs < 1.6 * plain, figures


def test_memory_that_runs_out_in_backward_is_split(calls: Calls) -> None:
    module, sizes = Decoder().cuda(), []

    def short(error: BaseException, phase: str, size: int) -> bool:
        assert classify(error).kind is ErrorKind.OOM
        sizes.append(size)
        return True

    x = torch.randn(48, 512, WIDTH, device="cuda")
    held = HarnessRoot(module, Seams(Bystander()), calls, short)
    plain = gradients(module, held, x)

    def reserved(size: int) -> int:
        held.apply(Plan.of({"activation_offload": "all", "micro_batch": str(size)}))
        backward(module, held, x)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        backward(module, held, x)
        torch.cuda.empty_cache()
        return torch.cuda.max_memory_reserved()

    cap = (reserved(12) + reserved(24)) / 2
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.mem_get_info()[1])
    try:
        backward(module, held, x)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert sizes, "memory ran out"
    assert off(gathered(module), plain) < EXACT
    held.take_back()


@pytest.mark.parametrize("drop", [0.0, 0.2])
@pytest.mark.parametrize("precision", ["as_is", "bf16"])
@pytest.mark.parametrize("level", ["2", "3"])
def test_checkpointed_gradients_are_the_same(
    level: str, precision: str, drop: float, calls: Calls, x: torch.Tensor
) -> None:
    """With the fused kernels of the card, where attention drops too."""
    module = Decoder(drop).cuda()
    held = root_of(module, calls)
    held.apply(Plan.of({"precision": precision}))
    plain = gradients(module, held, x)
    whole = peak(lambda: held.running(x).float().square().mean().backward())
    prove(held, Plan.of({"checkpointing": level, "precision": precision}), (x,), {}, Facts())
    found = gradients(module, held, x)
    assert off(found, plain) < (EXACT if precision == "as_is" else 1e-3)
    less = peak(lambda: held.running(x).float().square().mean().backward())
    assert less < 0.9 * whole
    held.take_back()


TRAIN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(1024, 4096)
        self.down = nn.Linear(4096, 1024)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(16)), nn.Linear(1024, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(400):
    x = torch.randn(32768, 1024, device="cuda")
    loss = nn.functional.mse_loss(model(x), x.mean(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
"""Saves 10 GiB; weights and gradients are one more."""


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("name", "level", "script", "memory"),
    [
        ("activation_offload", "half", TRAIN, 11 * GIB),
        ("compile", "budget", TRAIN, 21 * GIB // 2),
    ],
    ids=["half", "budget"],
)
def test_a_search_picks_it(name: str, level: str, script: str, memory: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    asked = ["--memory", str(memory), "--allow", "exact", "--only", name, "--json"]
    line = [sys.executable, "-m", "autofit", "search", "train.py", *asked]
    ran = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)
    assert found["plan"][name] == level, ran.stderr
    assert found["peak_bytes"] <= memory
