"""Eager backward in float16: the gradients are those of the script's own loss scale, every step.

The reference is a loop cut by hand, which scales each part's loss as ``GradScaler`` says. The split
call must agree to the bit: the same parts, the same factor, the same sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autofit.plan import Plan
from autofit.worker.harness.batch.call_state import LossScale
from autofit.worker.harness.torch_state.rng import Ambient
from tests.harness.real_runs import running
from tests.roots import Notes

pytestmark = pytest.mark.quick

BATCH, MICRO_BATCH, STEPS = 21, 7, 9
SPLIT = Plan.of({"micro_batch": str(MICRO_BATCH)})
CALLS: Notes[int] = Notes()
"""The samples of each forward; not in the model, which must keep nothing of one."""


class Losing(nn.Module):
    """Returns its mean loss, so small that its gradients lose digits in float16 unless scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Count the parts: each runs once where backward is eager, twice where it is not."""
        CALLS.append(len(x))
        scores = self.last(torch.tanh(self.first(x)))
        return F.cross_entropy(scores.float(), y) * 1e-3


@dataclass
class Trained:
    """What a training leaves behind."""

    gradients: list[Tensor] = field(default_factory=list)
    """Of every step, scaled."""
    scales: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    """Forward passes of every step."""


Alter = Callable[[int, torch.amp.GradScaler], None]


def train(parts: int, alter: Alter) -> Trained:
    """Train in float16, each batch in ``parts``; ``alter`` may change the scale before a step."""
    torch.manual_seed(0)
    model = Losing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=4)
    left = Trained()
    for step in range(STEPS):
        x, y = torch.randn(BATCH, 8), torch.randint(8, (BATCH,))
        CALLS.clear()
        alter(step, scaler)
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(xs, ys)
            scaler.scale(loss / parts).backward()
        left.gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        left.calls.append(list(CALLS).count(MICRO_BATCH))
        left.scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    left.weights = [p.detach().clone() for p in model.parameters()]
    return left


def unaltered(step: int, scaler: torch.amp.GradScaler) -> None:
    """Leave the scale to the scaler, which doubles it after four good steps."""


def overflowing(step: int, scaler: torch.amp.GradScaler) -> None:
    """Let the scale be far too large once: that step overflows and the scale halves."""
    if step == 5:
        scaler.update(2.0**60)


@pytest.mark.parametrize("alter", [unaltered, overflowing])
def test_the_gradients_of_a_loop_cut_by_hand(alter: Alter) -> None:
    by_hand = train(BATCH // MICRO_BATCH, alter)
    with running(SPLIT):
        split = train(1, alter)
    assert split.scales == by_hand.scales
    assert len(set(split.scales)) > 1
    torch.testing.assert_close(split.gradients, by_hand.gradients, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(split.weights, by_hand.weights, rtol=0, atol=0)


def test_it_is_eager_once_the_scale_has_settled() -> None:
    with running(SPLIT):
        calls = train(1, unaltered).calls
    # Parts run again while the scale is not known; once it is, none. Then it doubles: the eager
    # gradients are in the old scale, so all run again; the one after that looks whether it stays.
    assert calls[1:4] == [5, 3, 3]
    assert calls[4:8] == [6, 5, 3, 3]


def in_half(parts: int) -> list[Tensor]:
    """Train float16 weights with a fixed scale, outside autocast."""
    torch.manual_seed(0)
    model = Losing().half()
    gradients = []
    for _ in range(4):
        model.zero_grad()
        x, y = torch.randn(BATCH, 8).half(), torch.randint(8, (BATCH,))
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (model(xs, ys) * (2**14 / parts)).backward()
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return gradients


def test_float16_weights_and_a_scale_of_the_scripts_own() -> None:
    by_hand = in_half(BATCH // MICRO_BATCH)
    with running(SPLIT):
        split = in_half(1)
    for found, expected in zip(split, by_hand, strict=True):
        difference = (found - expected).float().norm() / expected.float().norm()
        assert difference <= 1e-3  # the order of the sums; three times that unscaled


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float16, True), (torch.bfloat16, False)])
def test_autocast_inside_the_model_is_seen(dtype: torch.dtype, expected: bool) -> None:
    """The graph of the loss tells, whoever entered autocast, and stays as it was."""
    model, scale, ambient = Losing(), LossScale(), Ambient.now()
    assert scale.matters(ambient) is None
    with torch.autocast("cpu", dtype=dtype):
        loss = model(torch.randn(BATCH, 8), torch.randint(8, (BATCH,)))
    assert scale.learn(ambient, loss) is scale.matters(ambient) is expected
    loss.backward()
