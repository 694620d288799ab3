"""A script that accumulates by itself: no chunk runs twice, whatever comes between.

Each scenario runs twice, by itself and inside a real run whose plan splits the root, and returns
its gradients after every step. It counts the samples that the model has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autofit.plan import Plan
from tests.harness.real_runs import running
from tests.roots import Notes

pytestmark = pytest.mark.quick

SAMPLES, PART, CALLS = 11, 5, 2
SPLIT = Plan.of({"micro_batch": str(PART)})
HUGE = 1 << 50
"""Bytes that no machine has."""


class Losing(nn.Module):
    """Returns its mean loss; counts the samples of its forwards."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(8, 3)
        self.rest = nn.Linear(3, 3)  # frozen in some steps

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        SEEN.append(len(x))
        scores = self.rest(Eats.apply(self.last(self.drop(torch.tanh(self.first(x))))))  # type: ignore[no-untyped-call]
        return F.cross_entropy(scores, y)


SEEN: Notes[int] = Notes()
SHORT: SimpleQueue[tuple[str, int]] = SimpleQueue()
"""What runs out of memory, and how many chunks of four samples do not before."""


class Eats(torch.autograd.Function):
    """Runs out of memory as ``SHORT`` says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _short("forward", len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        _short("backward", len(gradients[0]))
        return gradients[0]


def _short(where: str, samples: int) -> None:
    if SHORT.empty() or samples != 4:  # of chunks of 3, 4 and 4 samples
        return
    wanted, later = SHORT.get()
    if wanted == where and not later:
        torch.empty(HUGE, dtype=torch.int8)
    SHORT.put((wanted, later - (wanted == where)))


def batches(number: int) -> Iterator[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    for _ in range(number):
        yield (
            torch.randn(SAMPLES, 5, generator=draws).double(),
            torch.randint(3, (SAMPLES,), generator=draws),
        )


Between = Callable[[int, nn.Module, torch.optim.Optimizer, Tensor], Tensor | None]
"""Gets the number of the call, the model, the optimizer and the loss; returns what is
differentiated, or ``None`` to skip it."""


def halved(call: int, model: Any, optimizer: Any, loss: Tensor) -> Tensor:
    return loss / CALLS


def train(between: Between, steps: int = 5, dropout: float = 0.0, calls: int = CALLS) -> list[Any]:
    """Return the gradients before each step of so many calls, and the losses."""
    torch.manual_seed(0)
    model = Losing(dropout).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left: list[Any] = []
    for call, (x, y) in enumerate(batches(steps * calls)):
        loss = model(x, y)
        asked = between(call, model, optimizer, loss)
        if asked is not None:
            asked.backward()
        left.append(loss.detach().clone())
        if call % calls == calls - 1:
            left += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return left


def same(between: Between, **how: Any) -> list[int]:
    """Compare a training by itself with one in chunks; return the samples of the latter's calls."""
    plain = train(between, **how)
    with running(SPLIT):
        before = len(SEEN)
        split = train(between, **how)
    assert len(plain) == len(split)
    for one, other in zip(plain, split, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)
    return [*SEEN][before:]


@pytest.mark.parametrize("scale", [1.0, 4.0], ids=["no scaler", "a loss scaler"])
@pytest.mark.parametrize("calls", [1, 2, 4])
def test_no_chunk_runs_twice_once_the_factor_is_known(calls: int, scale: float) -> None:
    def between(call: int, model: Any, optimizer: Any, loss: Tensor) -> Tensor:
        return loss / calls * scale

    seen = same(between, steps=8, calls=calls)
    more = same(between, steps=9, calls=calls)
    assert sum(more) - sum(seen) == calls * SAMPLES


@pytest.mark.parametrize("calls", [1, 2, 4])
def test_a_scale_that_doubles_in_mid_run_costs_two_calls_more(calls: int) -> None:
    def total(double: bool) -> int:
        def between(call: int, model: Any, optimizer: Any, loss: Tensor) -> Tensor:
            return loss / calls * (2.0 if double and call >= 5 * calls else 1.0)

        return sum(same(between, steps=9, calls=calls))

    more = total(double=True) - total(double=False)
    assert more == 0 if calls == 1 else 0 < more <= 2 * SAMPLES


@pytest.mark.parametrize("calls", [{7}, {5, 7}, {5, 7, 9, 11}])
def test_another_factor(calls: set[int]) -> None:
    def between(call: int, model: Any, optimizer: Any, loss: Tensor) -> Tensor:
        return loss * (3.0 if call in calls else 0.5)

    same(between, steps=7)


def test_a_loss_that_is_skipped() -> None:
    same(lambda call, m, o, loss: None if call in (7, 11) else loss / CALLS, steps=8)


def test_gradients_that_are_read_or_changed_before_the_backward() -> None:
    def between(call: int, model: Any, optimizer: Any, loss: Tensor) -> Tensor:
        if call == 7:
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
        return loss / CALLS

    same(between, steps=6)


@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize("at", [{7}, set(range(100))])
def test_gradients_that_are_zeroed_between_forward_and_backward(none: bool, at: set[int]) -> None:
    def between(call: int, model: Any, optimizer: Any, loss: Tensor) -> Tensor:
        if call in at:
            optimizer.zero_grad(set_to_none=none)
        return loss / CALLS

    same(between, steps=6)


def test_gradients_that_are_dropped_by_hand() -> None:
    def between(call: int, model: Any, optimizer: Any, loss: Tensor) -> Tensor:
        if call == 7:
            model.first.weight.grad = None
        return loss / CALLS

    same(between, steps=6)


def test_a_step_before_the_backward() -> None:
    def between(call: int, model: Any, optimizer: Any, loss: Tensor) -> Tensor | None:
        if call != 7:
            return loss / CALLS
        optimizer.step()
        return None

    same(between, steps=6)


def test_a_call_that_is_not_differentiated_in_evaluation_mode() -> None:
    def between(call: int, model: Any, optimizer: Any, loss: Tensor) -> Tensor:
        x, y = next(batches(1))
        model.eval()
        model(x, y)
        model.train()
        return loss / CALLS

    same(between, steps=6)


def test_two_calls_before_their_backwards() -> None:
    def between(call: int, model: Any, optimizer: Any, loss: Tensor) -> Tensor:
        x, y = next(batches(1))
        return loss / CALLS if call < 6 else loss / CALLS + model(x, y) / CALLS

    same(between, steps=6)


def test_frozen_in_between() -> None:
    def between(call: int, model: Any, optimizer: Any, loss: Tensor) -> Tensor:
        model.rest.requires_grad_(call % 4 < 2)
        return loss / CALLS

    same(between, steps=6)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_memory_that_runs_out_while_chunks_add(where: str, dropout: float) -> None:
    """What the chunks before have added is taken back."""

    def short(call: int, model: Any, optimizer: Any, loss: Tensor) -> Tensor:
        if call == 8:
            SHORT.put((where, 1))
        return loss / CALLS

    with running(SPLIT):
        split = train(short, steps=6, dropout=dropout)
    assert SHORT.empty()
    with running(SPLIT):
        expected = train(halved, steps=6, dropout=dropout)
    for one, other in zip(expected, split, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)
