"""Training on several devices at once, as a flag: one process for each, started by torchrun.

Every rank draws the same weights and takes its share of each batch, so that a step is the step of
one process with the whole batch.
"""

import argparse
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Ranks:
    """Who this process is among its peers, and where it trains."""

    rank: int
    world: int
    device: str


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag."""
    ways = ("none", "ddp", "fsdp2")
    parser.add_argument("--parallel", choices=ways, default="none", help="under torchrun")


def join(arguments: argparse.Namespace) -> Ranks:
    """Meet the other ranks, where the training is spread over several."""
    if arguments.parallel == "none":
        return Ranks(0, 1, arguments.device)
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(f"--parallel {arguments.parallel}: start it with torchrun")
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), str(device))


def built_on(arguments: argparse.Namespace, ranks: Ranks) -> str:
    """Return where to make the model: on the host where no device has to hold all of it."""
    return "cpu" if arguments.parallel == "fsdp2" else ranks.device


def spread(
    model: nn.Module, blocks: Iterable[nn.Module], arguments: argparse.Namespace, ranks: Ranks
) -> nn.Module:
    """Return the model as all ranks train it together; shards go to their own devices."""
    if arguments.parallel == "ddp":
        on_card = torch.device(ranks.device).type == "cuda"
        return DistributedDataParallel(model, device_ids=[ranks.device] if on_card else None)
    if arguments.parallel == "fsdp2":
        mesh = init_device_mesh(torch.device(ranks.device).type, (ranks.world,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def reducing(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Return the context of a part of a batch: gradients are reduced with the last one alone."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return nullcontext()


def mean(loss: Tensor, ranks: Ranks) -> float:
    """Return the mean of a loss over all ranks."""
    if ranks.world > 1:
        loss = loss.clone()
        dist.all_reduce(loss)
    return loss.item() / ranks.world


def leave() -> None:
    """End the process group, after the model is freed.

    A gloo thread may still hold a tensor of the last reduction, and needs the GIL to free it. A
    DDP model that owns the group would wait for that thread, and would hold the GIL meanwhile.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
