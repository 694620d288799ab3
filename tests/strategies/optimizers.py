"""What the tests of optimizers share: a small model, the way scripts train it, and comparisons."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.worker.harness.patching.observers import Seams
from autofit.worker.harness.patching.optimizers import Optimizers

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

    optimizers: Optimizers

    def __init__(self, *roots: nn.Module) -> None:
        self.seams = Seams(Nobody())
        self.plan = Plan()
        self.roots = roots

    def optimizer_plan(self) -> Plan:
        return self.plan

    def optimizer_refused(self, refusal: Refused) -> None:
        raise refusal

    def optimizer_broke(self, error: Exception) -> bool:
        return False

    def modules(self) -> tuple[nn.Module, ...]:
        return self.roots


@contextmanager
def owned() -> Iterator[Under]:
    """Let every optimizer step under the ``plan`` of what is yielded."""
    owner = Under()
    optimizers = owner.optimizers = Optimizers(owner)
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


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda net: SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "sgd_plain": lambda net: SGD(groups(net), lr=0.05),
    "adam": lambda net: Adam(net.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95)),
    "adamw": lambda net: AdamW(groups(net), lr=1e-2),
    "amsgrad": lambda net: AdamW(net.parameters(), lr=1e-2, amsgrad=True, maximize=True),
    "foreach": lambda net: Adam(net.parameters(), lr=1e-2, foreach=True),
    "adagrad": lambda net: Adagrad(groups(net), lr=0.05, lr_decay=0.01),
}


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


def exact(dtype: torch.dtype) -> float:
    return 1e-9 if dtype is torch.float64 else 1e-3


def rich(net: nn.Module, under: Under, plan: Plan) -> tuple[list[float], int]:
    """Train with all that scripts do around an optimizer; return the rates and closures called."""
    under.plan = plan
    first, *rest = net.parameters()
    parts: list[dict[str, Any]] = [{"params": [first]}, {"params": rest[:-1], "lr": 3e-3}]
    optimizer = AdamW(parts, lr=1e-2)
    warm_up = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    plateau = ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    rates, closures = [], 0

    def closure() -> torch.Tensor:
        nonlocal closures
        closures += 1
        assert torch.is_grad_enabled()
        optimizer.zero_grad(set_to_none=False)
        return backward(net, 100)

    for step in range(STEPS):
        if step == 10:
            optimizer.add_param_group({"params": rest[-1:], "weight_decay": 0.2})
        optimizer.zero_grad()
        for part in range(2):  # accumulation
            loss = backward(net, 2 * step + part)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        if step % 5 == 4:
            loss = optimizer.step(closure)
        else:
            scaler.step(optimizer)
            scaler.update()
        if step < 10:
            warm_up.step()
        else:
            plateau.step(float(loss.detach()))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates, closures
