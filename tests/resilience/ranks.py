"""What each rank runs: rank 1 runs out of memory once, and all say what became of it.

``ranks.py DEVICE WRAP PHASE HOW``: ``cpu`` (gloo, under a cap from outside) or ``cuda`` (NCCL,
under one of its own); ``ddp`` or ``fsdp``; ``forward``, ``backward``, ``step`` or ``first`` (before
any collective of the model); ``short`` or ``bug``.
"""

import json
import os
import sys
import time
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import autofit
from autofit.exceptions import CannotRetry
from autofit.resilience.records import Retry

device, wrap, phase, how = sys.argv[1:]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CAP = 2 << 30
"""Bytes of a GPU for each rank; on the CPU the cap is set from outside."""
torch.set_num_threads(1)
if device == "cuda":
    torch.cuda.set_device(rank)
    total = torch.cuda.get_device_properties(rank).total_memory
    torch.cuda.set_per_process_memory_fraction(CAP / total)


def full(batch_size: int) -> None:
    """Ask for more than there is, on rank 1, until the batches are small."""
    if failing and rank == 1 and batch_size > 8:
        if how == "bug":
            raise ValueError("a bug of rank 1")
        torch.empty(2 * CAP if device == "cuda" else 1 << 28, dtype=torch.uint8, device=device)


class InBackward(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, batch_size: int) -> torch.Tensor:
        ctx.batch_size = batch_size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        full(ctx.batch_size)
        return gradients[0], None


def wrapped(model: nn.Sequential) -> nn.Module:
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh(device, (size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


tried: list[int] = []
memory: list[int | None] = []


def told(retry: Retry) -> None:
    memory.append(retry.memory)


@autofit.resilient(batch_size=16, on_retry=told)
def train(batch_size: int, accumulation: int = 1) -> list[float]:
    tried.append(batch_size)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    if phase == "first":
        full(batch_size)
    model = wrapped(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: full(batch_size) if phase == "step" else None)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(3):
        x = torch.randn(16, 8, generator=data).to(device)
        optimizer.zero_grad()
        for part in x.split(batch_size):
            if phase == "forward" and step == 1:
                full(batch_size)
            hidden = model(part)
            if phase == "backward" and step == 1:
                hidden = InBackward.apply(hidden, batch_size)  # type: ignore[no-untyped-call]
            loss = hidden.pow(2).mean() / accumulation
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


distributed.init_process_group("nccl" if device == "cuda" else "gloo")
base = torch.ones(1 << 24, device=device)
if device == "cuda":  # cuBLAS keeps a workspace a thread
    nn.Linear(8, 8, device=device)(torch.ones(8, 8, device=device)).sum().backward()
failing = True
said: dict[str, Any] = {"rank": rank}
if device == "cuda":
    said["start"] = torch.cuda.memory_allocated()
started = time.monotonic()
try:
    said["losses"] = train()
    said["seconds"] = time.monotonic() - started
    failing = False
    said["again"] = train()
except (CannotRetry, ValueError) as error:
    said["error"] = f"{type(error).__name__}: {error}"
said |= {"tried": tried, "memory": memory}
print("SAID " + json.dumps(said), flush=True)
if device == "cuda":
    time.sleep(1)  # rank 0 keeps the store
    os._exit(0)  # a group that was aborted has nothing to say at the end
