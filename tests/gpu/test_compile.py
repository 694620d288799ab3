"""Compiled on a real GPU: the same gradients, the same draws, and memory that runs out in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.space.catalogue import clash
from autofit.strategies import Facts, Fidelity
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.session.root import HarnessRoot, RunPolicy
from autofit.worker.harness.verification.plan_check import prove
from autofit.worker.launch.launcher import launch
from autofit.worker.oom.classifier import ErrorKind, classify
from autofit.worker.records.trials import LaunchRequest, Script, TrialReport, Verdict
from tests.roots import Bystander

pytestmark = pytest.mark.gpu

LEVELS = ("regional", "full", "budget")
BESIDE: list[dict[str, str]] = [
    {},
    {"precision": "bf16"},
    {"precision": "tf32"},
    {"checkpointing": "all"},
    {"checkpointing": "2", "precision": "bf16"},
    {"micro_batch": "4"},
    {"micro_batch": "4", "checkpointing": "all", "precision": "bf16"},
]
ROUNDING = 0.05
TRAIN = """
import sys
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1024, 8192), nn.GELU(), nn.Linear(8192, 1024))
    def forward(self, x):
        return x + self.mlp(x)

model = nn.Sequential(nn.Linear(16, 1024), nn.Sequential(*[Block() for _ in range(4)])).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(400):
    x = torch.randn(32, 1024, 16, device="cuda")
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


class Block(nn.Module):
    """A decoder's block."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.qkv = nn.Linear(64, 192)
        self.mlp = nn.Sequential(
            nn.Linear(64, 256), nn.GELU(), nn.Dropout(drop), nn.Linear(256, 64), nn.Dropout(drop)
        )
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.drop if self.training else 0.0
        )
        x = x + mixed.transpose(1, 2).flatten(-2)
        after: torch.Tensor = x + self.mlp(self.norms[1](x))
        return after


class Decoder(nn.Module):
    """Four of them."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(4))
        self.head = nn.Linear(64, 96)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


@pytest.fixture
def tokens() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(96, (8, 64), device="cuda")


def gradients(module: nn.Module, held: HarnessRoot, tokens: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    module.zero_grad()
    logits = held.running(tokens)
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return torch.cat([p.grad.flatten().double() for p in module.parameters() if p.grad is not None])


def under(
    plan: Plan, module: nn.Module, calls: Calls, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients without the plan, and under it once it is proven."""
    policy = RunPolicy(strict=True)
    held = HarnessRoot(module, Seams(Bystander()), calls, lambda *args: False, policy=policy)
    plain = gradients(module, held, tokens)
    prove(held, plan, (tokens,), {}, Facts())
    found = [gradients(module, held, tokens) for _ in range(2)][-1]
    held.take_back()
    return plain, found


@pytest.mark.parametrize("beside", BESIDE, ids=lambda each: "+".join(each.values()) or "alone")
@pytest.mark.parametrize("level", LEVELS)
def test_the_same_gradients(
    level: str, beside: dict[str, str], calls: Calls, tokens: torch.Tensor
) -> None:
    plan = Plan.of({"compile": level, **beside})
    if reason := clash(plan):
        pytest.skip(reason)
    plain, found = under(plan, Decoder().cuda(), calls, tokens)
    allowed = ROUNDING if plan.fidelity() is Fidelity.ROUNDING else 1e-5
    assert (found - plain).norm() / plain.norm() < allowed


@pytest.mark.parametrize("level", LEVELS[:2])
def test_the_draws_of_dropout_are_pytorchs_own(
    level: str, calls: Calls, tokens: torch.Tensor
) -> None:
    plain, found = under(Plan.of({"compile": level}), Decoder(0.2).cuda(), calls, tokens)
    assert (found - plain).norm() / plain.norm() < 1e-5


def test_a_budget_that_would_drop_otherwise_is_refused(calls: Calls, tokens: torch.Tensor) -> None:
    module = Decoder(0.2).cuda()
    with pytest.raises(Refused, match="differ"):
        under(Plan.of({"compile": "budget"}), module, calls, tokens)


def test_a_budget_lowers_the_peak(calls: Calls) -> None:
    tokens = torch.randint(96, (128, 512), device="cuda")
    module, peaks = Decoder().cuda(), {}
    for level in ("full", "budget"):
        under(Plan.of({"compile": level}), module, calls, tokens[:8])
        held = HarnessRoot(module, Seams(Bystander()), calls, lambda *args: False)
        held.apply(Plan.of({"compile": level}))
        gradients(module, held, tokens)
        module.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        held.running(tokens).float().mean().backward()
        peaks[level] = torch.cuda.max_memory_allocated() - before
        held.take_back()
    assert peaks["budget"] < 0.85 * peaks["full"], peaks


def test_a_shortage_in_compiled_code_is_one_and_the_step_goes_on_smaller(calls: Calls) -> None:
    """The cap falls once the code is made; the gradients are those of the whole."""
    module, sizes = Decoder().cuda(), []

    def short(error: BaseException, phase: str, size: int) -> bool:
        assert classify(error).kind is ErrorKind.OOM
        sizes.append(size)
        return True

    tokens = torch.randint(96, (256, 512), device="cuda")
    policy = RunPolicy(strict=True)
    held = HarnessRoot(module, Seams(Bystander()), calls, short, policy=policy)
    plain = gradients(module, held, tokens)
    prove(held, Plan.of({"compile": "full", "micro_batch": "128"}), (tokens,), {}, Facts())
    gradients(module, held, tokens)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    gradients(module, held, tokens)
    cap = 0.7 * torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.mem_get_info()[1])
    try:
        found = gradients(module, held, tokens)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert sizes, "memory ran out"
    assert (found - plain).norm() / plain.norm() < 1e-5
    held.take_back()


def test_plans_of_one_launch_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    plans = [
        Plan.of({"compile": "regional", "micro_batch": "auto"}),
        Plan.of({"compile": "full", "micro_batch": "4"}),
        Plan.of({"compile": "regional", "checkpointing": "all", "micro_batch": "8"}),
        Plan.of({"micro_batch": "4"}),
        Plan.of({"compile": "full"}),
    ]
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path)),
        plans=tuple(plans),
        device="cuda",
        budget=6 << 30,
        timeout=300,
    )
    reports = {e.plan: e for e in launch(request) if isinstance(e, TrialReport)}
    *fitting, last = plans
    for plan in fitting:
        report = reports[plan]
        assert report.verdict is Verdict.MEASURED, report
        compiled = [each.compile_seconds > 0 for each in report.measurements]
        assert compiled == [plan["compile"] != "as_is"] * len(compiled)
    assert reports[last].verdict is Verdict.OUT_OF_MEMORY
