"""Blocks as CUDA graphs on a real GPU: the results of plain blocks, to the bit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autofit.exceptions import Refused
from autofit.strategies.compile.graphs import MOST_NEW, GraphedBlock, GraphMemory

pytestmark = pytest.mark.gpu
WIDTH = 32


class Block(nn.Module):
    """A residual block with dropout and with statistics of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        after: torch.Tensor = x + scale * self.drop(self.layer(self.norm(x)))
        return after


@pytest.fixture
def blocks() -> list[Block]:
    torch.manual_seed(0)
    return [Block().cuda() for _ in range(3)]


def graphed(blocks: list[Block], changes: Callable[[], object] = lambda: 0) -> list[Any]:
    memory = GraphMemory()
    return [GraphedBlock(each, memory, changes).around(each) for each in blocks]


def train(blocks: list[Block], calls: list[Any], rows: Iterator[int]) -> list[float]:
    """Return the losses of steps of two accumulated parts, under autocast."""
    parameters = [p for each in blocks for p in each.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for size in rows:
        for _ in range(2):
            x = torch.randn(size, WIDTH, device="cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                for call in calls:
                    x = call(x, scale=0.5)
            loss = x.float().square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_training_is_the_same_to_the_bit() -> None:
    """With accumulation, dropout, running statistics, autocast, and a smaller last batch."""
    found = []
    for wrap in (list, graphed):
        torch.manual_seed(0)
        blocks = [Block().cuda() for _ in range(3)]
        losses = train(blocks, wrap(blocks), iter([8, 8, 8, 5, 8, 8]))
        found.append((losses, [t.clone() for b in blocks for t in b.state_dict().values()]))
    (plain, weights), (replayed, others) = found
    assert plain == replayed
    assert all(map(torch.equal, weights, others))


def test_blocks_may_run_in_another_order_than_they_were_recorded_in(blocks: list[Block]) -> None:
    def gradients(calls: list[Any], order: list[int]) -> list[torch.Tensor]:
        for block in blocks:
            block.zero_grad()
        torch.manual_seed(3)
        x = torch.randn(8, WIDTH, device="cuda")
        for index in order:
            x = calls[index](x)
        x.square().sum().backward()
        found = (p.grad for block in blocks for p in block.parameters())
        return [each.clone() for each in found if each is not None]

    calls = graphed(blocks)
    for order in ([0, 2], [0, 1, 2], [2, 1, 0], [1, 0]):
        plain, replayed = (gradients(each, order) for each in (list[Any](blocks), calls))
        assert all(map(torch.equal, plain, replayed))


def test_a_block_that_is_called_again_before_its_backward_runs_plainly(blocks: list[Block]) -> None:
    def gradients(call: Any) -> list[torch.Tensor]:
        blocks[0].zero_grad()
        torch.manual_seed(2)
        x = torch.randn(8, WIDTH, device="cuda")
        call(call(x)).sum().backward()
        return [p.grad.clone() for p in blocks[0].parameters() if p.grad is not None]

    (call,) = graphed(blocks[:1])
    for plain, replayed in zip(gradients(blocks[0]), gradients(call), strict=True):
        torch.testing.assert_close(replayed, plain)


def test_a_second_backward_after_another_call_is_refused(blocks: list[Block]) -> None:
    (call,) = graphed(blocks[:1])
    x = torch.randn(8, WIDTH, device="cuda")
    first = call(x).sum()
    first.backward(retain_graph=True)
    call(x).sum().backward()
    with pytest.raises(Refused, match="second backward"):
        first.backward()


def test_what_changes_is_recorded_anew_and_what_keeps_changing_is_refused(
    blocks: list[Block],
) -> None:
    block, version = blocks[0], iter(range(100))
    (call,) = graphed([block], lambda: next(version))
    x = torch.randn(8, WIDTH, device="cuda")
    for _ in range(MOST_NEW):
        call(x).sum().backward()
    with pytest.raises(Refused, match="keep changing"):
        call(x)


@pytest.mark.parametrize("given", [torch.zeros(2), object()], ids=["another device", "an object"])
def test_arguments_that_no_graph_can_take(blocks: list[Block], given: object) -> None:
    (call,) = graphed(blocks[:1])
    with pytest.raises(Refused, match="cannot take"):
        call(torch.randn(8, WIDTH, device="cuda"), scale=given)


class Reads(Block):
    """Reads a value of the GPU in its forward, which no recording can."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale=x.sum().item())


def test_a_block_that_reads_a_value_is_refused_and_the_process_goes_on() -> None:
    block = Reads().cuda()
    (call,) = graphed([block])
    x = torch.randn(8, WIDTH, device="cuda")
    with pytest.raises(Refused, match="cannot run as a CUDA graph"):
        call(x)
    block(x).sum().backward()
    torch.cuda.synchronize()


def test_the_memory_is_freed(blocks: list[Block]) -> None:
    x = torch.randn(8, WIDTH, device="cuda")
    graphed(blocks[1:])[0](x).sum().backward()  # cuBLAS keeps its workspace for the stream
    blocks[1].zero_grad()
    gc.collect()
    before = torch.cuda.memory_allocated()
    held = GraphedBlock(blocks[0], GraphMemory(), lambda: 0)
    held.around(blocks[0])(x).sum().backward()
    blocks[0].zero_grad()
    assert torch.cuda.memory_allocated() > before
    held.clear()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
