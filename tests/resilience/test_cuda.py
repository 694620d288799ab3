"""Real CUDA out of memory under a cap: each form of the decorator goes on, with the memory back."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import autofit
from autofit.resilience import ActivePlan
from autofit.resilience.records import Retry

pytestmark = pytest.mark.gpu

MiB = 1 << 20
ROOM = 512 * MiB
"""Bytes a test may take, above what is held when it starts."""
NEAR = 0.01
"""What is held before a retry: within one per cent of the start."""

memory: list[int | None] = []


@pytest.fixture(autouse=True)
def start() -> Iterator[int]:
    """Hold 256 MiB and cap the process a little above; return what is allocated."""
    warm = nn.Linear(1024, 1024, device="cuda")
    warm(torch.ones(8, 1024, device="cuda")).sum().backward()  # cuBLAS keeps a workspace a thread
    del warm
    gc.collect()
    torch.cuda.empty_cache()
    base = torch.empty(256 * MiB, dtype=torch.uint8, device="cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + ROOM) / total)
    memory.clear()
    yield torch.cuda.memory_allocated()
    del base
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def told(retry: Retry) -> None:
    memory.append(retry.memory)


def model_of() -> nn.Sequential:
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers).cuda()


def in_forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Keep an activation of 4 KiB a sample and layer."""
    loss: torch.Tensor = model(x).pow(2).mean()
    return loss


def test_a_batch_size(start: int) -> None:
    @autofit.resilient(batch_size=65536, on_retry=told, remember=False)
    def train(batch_size: int, accumulation: int) -> tuple[int, int]:
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            in_forward(model, torch.ones(batch_size, 1024, device="cuda")).backward()
            optimizer.step()
        return batch_size, accumulation

    size, accumulation = train()
    assert size < 65536
    assert size * accumulation == 65536
    assert memory == pytest.approx([start] * len(memory), rel=NEAR)
    assert memory


def test_an_optimizer_without_room(start: int) -> None:
    """The step runs out of memory, not the forward: its state is made inside, and goes."""

    @autofit.resilient(batch_size=8, on_retry=told, remember=False)
    def train(batch_size: int) -> int:
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())  # 32 MiB of state
        held = torch.empty(batch_size * 58 * MiB, dtype=torch.uint8, device="cuda")
        in_forward(model, torch.ones(8, 1024, device="cuda")).backward()
        optimizer.step()
        return batch_size * min(1, held.numel())

    assert train() == 8 // 2 ** len(memory)
    assert memory == pytest.approx([start] * len(memory), rel=NEAR)
    assert memory


def test_a_plan(start: int) -> None:
    attempts = []

    @autofit.resilient(on_retry=told, remember=False, effective_batch=32768)
    def train(plan: ActivePlan) -> str:
        attempts.append(str(plan))
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        size = plan.micro_batch or 32768
        with plan.autocast():
            in_forward(model, torch.ones(size, 1024, device="cuda")).backward()
        optimizer.step()
        return str(plan)

    train()
    assert len(attempts) > 1
    assert len(set(attempts)) == len(attempts)
    assert memory == pytest.approx([start] * len(memory), rel=NEAR)


def test_a_plan_applied(start: int) -> None:
    @autofit.resilient(on_retry=told, remember=False)
    def train(plan: ActivePlan) -> float:
        torch.manual_seed(0)
        model = model_of().append(nn.Linear(1024, 1, device="cuda"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan.apply(model)
        for _ in range(2):
            optimizer.zero_grad()
            loss = in_forward(model, torch.randn(32768, 1024, device="cuda"))
            loss.backward()
            optimizer.step()
        return loss.item()

    assert train() > 0
    assert memory == pytest.approx([start] * len(memory), rel=NEAR)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_step(start: int, phase: str) -> None:
    model = model_of()
    x = torch.randn(8192, 1024, device="cuda")
    held = torch.cuda.memory_allocated()
    hungry = phase == "backward"

    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, y: torch.Tensor) -> torch.Tensor:
            return y.view_as(y)

        @staticmethod
        def backward(
            ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor
        ) -> torch.Tensor:
            torch.empty(len(gradients[0]) * MiB // 16, dtype=torch.uint8, device="cuda")
            return gradients[0]

    @autofit.resilient.step(on_retry=told, remember=False)
    def step(batch: torch.Tensor) -> torch.Tensor:
        if hungry:
            return InBackward.apply(model(batch)).pow(2).mean()  # type: ignore[no-untyped-call,no-any-return]
        torch.empty(len(batch) * MiB // 16, dtype=torch.uint8, device="cuda")
        return in_forward(model, batch)

    step(x)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    in_forward(model, x).backward()
    for one, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-3, atol=1e-6)
    assert memory == pytest.approx([held] * len(memory), rel=NEAR)
    assert memory
