"""What each rank runs: steps under ``ddp`` or ``fsdp``, in which rank 1 runs out of memory.

``step_ranks.py cpu WRAP PHASE``, in ``forward`` or ``backward`` of batches of more than 8 samples.
"""

import json
import os
import sys
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import autofit
from autofit.exceptions import CannotRetry

wrap, phase = sys.argv[2:]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)


def full(samples: int) -> None:
    """Ask for more than there is."""
    if rank == 1 and samples > 8:
        torch.empty(1 << 28, dtype=torch.uint8)


class InBackward(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        full(len(gradients[0]))
        return gradients[0]


torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
data = [torch.randn(16, 8, dtype=torch.float64) for _ in range(size)]
expected = [torch.zeros_like(p) for p in plain.parameters()]
for each in data:
    found = torch.autograd.grad(plain(each).pow(2).mean(), list(plain.parameters()))
    expected = [so_far + more / size for so_far, more in zip(expected, found, strict=True)]

distributed.init_process_group("gloo")
model: nn.Module = plain
if wrap == "ddp":
    model = nn.parallel.DistributedDataParallel(plain)
else:
    fully_shard(plain, mesh=init_device_mesh("cpu", (size,)))


@autofit.resilient.step
def step(batch: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = model(batch)
    if phase == "forward":
        full(len(batch))
    else:
        hidden = InBackward.apply(hidden)  # type: ignore[no-untyped-call]
    return hidden.pow(2).mean()


said: dict[str, Any] = {"rank": rank}
try:
    for _ in range(2):
        model.zero_grad()
        said["loss"] = step(data[rank]).item()
    pairs = zip(plain.parameters(), expected, strict=True)
    said["error"] = max(float((p.grad - e).abs().max()) for p, e in pairs if p.grad is not None)
except CannotRetry as error:
    said["refused"] = str(error)
except RuntimeError as error:
    said["lost"] = str(error)
print("SAID " + json.dumps(said), flush=True)
os._exit(0)  # what waits for the other rank shall see that it is gone
