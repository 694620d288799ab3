"""An MLP of 60 narrow blocks: Python and kernel launches take all of a step's time.

    python benchmarks/works/deep.py --precision bf16 --optimizer fused --by-hand 8 4 2

Prints the milliseconds of a step. ``--by-hand`` accumulates over parts of so many samples, one
after the other in one process; without it the script trains in whole batches.
"""

import argparse
import json
import time

import torch
from by_hand import adamw, add_flags, autocast
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--layers", type=int, default=60)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--by-hand", type=int, nargs="+")
add_flags(parser)
options = parser.parse_args()
width = options.width


class Deep(nn.Module):
    """Residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            for _ in range(options.layers)
        )
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


for part in options.by_hand or [options.batch]:
    torch.manual_seed(0)
    model = Deep().to(options.device)
    optimizer = adamw(model.parameters(), options, lr=1e-3, weight_decay=0.01)
    x = torch.randn(options.batch, width, device=options.device)
    y = torch.randint(10, (options.batch,), device=options.device)
    milliseconds = []
    for _ in range(options.steps):
        began = time.perf_counter()
        for rows in range(0, options.batch, part):
            with autocast(options):
                loss = functional.cross_entropy(model(x[rows : rows + part]), y[rows : rows + part])
            if part < options.batch:
                loss = loss * (part / options.batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        milliseconds.append(1e3 * (time.perf_counter() - began))
    tail = sorted(milliseconds[options.steps // 3 :])
    low, median = tail[len(tail) // 10], tail[len(tail) // 2]
    print(json.dumps({"part": part, "low": low, "median": median, "loss": value}), flush=True)
