"""What the tests of optimizers share: a small model, the way scripts train it, and comparisons."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.worker.harness.optimizers import Optimizers
from autofit.worker.harness.seams import Seams

STEPS = 20
WIDTH = 96
"""Two layers of 9216 weights, above what stays in 32 bits, and biases below."""

Make = Callable[[nn.Module], Optimizer]


class Nobody:
    """Listens at the seams, and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: None


class Under:
    """Owns the optimizers of a test; refusals end it."""

    def __init__(self, *roots: nn.Module) -> None:
        self.seams = Seams(Nobody())
        self.plan = Plan()
        self.roots = roots

    def optimizer_plan(self) -> Plan:
        return self.plan

    def optimizer_refused(self, refusal: Refused) -> None:
        raise refusal

    def modules(self) -> tuple[nn.Module, ...]:
        return self.roots


@contextmanager
def owned() -> Iterator[Under]:
    """Let every optimizer step under the ``plan`` of what is yielded."""
    owner = Under()
    optimizers = Optimizers(owner)
    optimizers.attach()
    try:
        yield owner
    finally:
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


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of all tensors in the state."""
    tensors = (v for state in optimizer.state.values() for v in state.values())
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
