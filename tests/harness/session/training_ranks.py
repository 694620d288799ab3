"""DistributedDataParallel on gloo ranks, with something amiss on one of them if asked."""

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--out")
parser.add_argument("--wrap", choices=["ddp", "fsdp2"], default="ddp")
parser.add_argument("--rank", type=int, default=1, help="On which something is amiss.")
parser.add_argument("--amiss", default="", help="What.")
args = parser.parse_args()

if args.amiss == "alone":
    rank = int(os.environ["RANK"])
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
amiss = args.amiss if rank == args.rank else ""
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Hungry(torch.autograd.Function):
    """Needs a gigabyte in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        torch.zeros(1 << 27)
        return cotangent


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 256)
        self.down = nn.Linear(256, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        if amiss == "mixing":
            x = x - x.mean(0)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1).mean(-1)  # type: ignore[no-any-return]


model = Net()
reductions = 0


def counted(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    global reductions
    reductions += bool(bucket.is_last())
    return allreduce_hook(group, bucket)


if args.amiss == "alone":
    root: Any = model
elif args.wrap == "ddp":
    root = DistributedDataParallel(model)
    root.register_comm_hook(None, counted)
else:
    for block in model.blocks:
        fully_shard(block)
    root = fully_shard(model)
optimizer = torch.optim.AdamW(root.parameters(), lr=1e-2)
torch.manual_seed(rank + 1)
held = torch.zeros(1 << 20) if amiss == "larger" else None
if args.amiss == "files":
    if rank == 0:
        Path("shared.txt").write_text("written by rank 0")
    dist.barrier()
    assert Path("shared.txt").read_text() == "written by rank 0"
for step in range(args.steps):
    x = torch.randn(16, 32, 16)
    if step == 2:
        if amiss == "bug":
            raise ValueError("a bug of rank 1 alone")
        if amiss == "exit":
            raise SystemExit(0)
        if amiss == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if amiss == "hang":
            time.sleep(600)
        if amiss == "hungry":
            x = Hungry.apply(x.requires_grad_())  # type: ignore[no-untyped-call]
    if amiss == "evaluates" and step % 3 == 0:
        with torch.no_grad():
            model(x)
    loss = nn.functional.mse_loss(root(x), x.detach().mean((1, 2)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if args.out and rank == 0:
    torch.save(model.state_dict(), args.out)
    Path(args.out).with_suffix(".json").write_text(json.dumps({"reductions": reductions}))
if args.amiss != "alone":
    dist.barrier()  # else gloo may stop or abort the process at its end
    dist.destroy_process_group()
