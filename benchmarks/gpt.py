"""A GPT of nanoGPT's sizes on random tokens: what ``overhead.py`` runs. Without autofit.

    python benchmarks/gpt.py --preset cpu --steps 60

Prints one line of JSON: the median, the quartiles and the number of the steps' seconds. Where
``RANK`` and ``WORLD_SIZE`` are set it trains under ``DistributedDataParallel``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 5
"""Steps dropped: allocations, caches, optimizer state."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model and its batch."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    vocabulary: int


PRESETS = {
    "tiny": Size(2, 2, 32, 16, 4, 65),
    "cpu": Size(4, 4, 128, 64, 12, 65),
    "baby": Size(6, 6, 384, 256, 64, 65),
    "124m": Size(12, 12, 768, 1024, 12, 50304),
}
"""``cpu`` and ``baby``: nanoGPT's character models for a laptop and for a GPU; ``124m``: GPT-2."""


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.first, self.second = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same."""
        batch, length, width = x.shape
        split = self.qkv(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        residual: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return residual


class GPT(nn.Module):
    """Tokens and targets, each (batch, time), to logits and loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, (batch, time, vocabulary), and their mean cross-entropy."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def seconds_of_steps(size: Size, device: str, steps: int) -> list[float]:
    """Train; return the seconds of each step after the first few."""
    torch.manual_seed(0)
    model: nn.Module = GPT(size).to(device)
    if torch.distributed.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randint(size.vocabulary, (size.batch, size.context + 1), device=device)
    x, y = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    seconds = []
    for _ in range(WARM_UP + steps):
        started = time.perf_counter()
        _, loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_UP:]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Times the steps of a small GPT.")
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    device = options.device
    if "RANK" in os.environ:
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', os.environ['RANK'])}"
            torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    seconds = seconds_of_steps(PRESETS[options.preset], device, options.steps)
    low, median, high = statistics.quantiles(seconds, n=4)
    line = {"median": median, "low": low, "high": high, "steps": len(seconds)}
    sys.stdout.write(json.dumps(line) + "\n")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # else gloo may stop or abort the process at its end
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
