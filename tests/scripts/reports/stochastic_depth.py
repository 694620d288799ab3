"""Stochastic depth: Python's random skips a block, now and then, for the whole batch.

Source: https://github.com/huggingface/transformers/issues/30113
"""

import argparse
import random

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, drop):
        super().__init__()
        self.drop = drop
        self.norm, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)),
        )

    def forward(self, x):
        keep = 1.0
        if self.training:
            keep = float(random.random() >= self.drop) / (1 - self.drop)
        return x + keep * self.mlp(self.norm(x))


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.first, self.head = nn.Linear(8, width), nn.Linear(width, 5)
        self.layers = nn.ModuleList(Block(width, 0.02) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
random.seed(1)
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sounds, labels = torch.randn(64, 10, 8), torch.randint(5, (64,))
for step in range(30):
    rows = torch.randint(64, (16,))
    loss = F.cross_entropy(model(sounds[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.10f}")
torch.save(model.state_dict(), args.out)
