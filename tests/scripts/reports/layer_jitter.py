"""NumPy draws in each block: a span is masked, a branch is scaled.

Source: https://github.com/openai/guided-diffusion/issues/167
"""

import argparse
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, keep):
        super().__init__()
        self.keep, self.norm = keep, nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x):
        y = self.mlp(self.norm(x))
        if self.training:
            mask = np.ones(x.shape[:2])
            start = np.random.randint(x.shape[1] - 2)  # SpecAugment: one span of time for the batch
            mask[:, start : start + 2] = 0
            y = (
                y
                * torch.as_tensor(mask, dtype=x.dtype).unsqueeze(-1)
                * float(random.random() < self.keep)
                / self.keep
            )
        return x + y


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.first, self.head = nn.Linear(8, width), nn.Linear(width, 5)
        self.layers = nn.ModuleList(Block(width, 0.9) for _ in range(4))

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
np.random.seed(0), random.seed(0)
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sounds, labels = torch.randn(64, 10, 8), torch.randint(5, (64,))
for step in range(20):
    rows = torch.randint(64, (16,))
    loss = F.cross_entropy(model(sounds[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        print(f"step {step} loss {loss.item():.10f}")
torch.save(model.state_dict(), args.out)
