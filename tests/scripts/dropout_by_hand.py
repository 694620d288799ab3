"""Dropout between the blocks; the batch is cut into four by hand."""

import argparse

import torch
from model import Block
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--rate", type=float, default=0.3)
args = parser.parse_args()


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(Block(16), nn.Dropout(args.rate)) for _ in range(3)]
        self.first, self.layers, self.head = (
            nn.Linear(8, 16),
            nn.ModuleList(layers),
            nn.Linear(16, 4),
        )

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(args.seed)
torch.set_default_dtype(torch.float64)
model = Noisy()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, args.steps + 1):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    total = 0.0
    for part in x.split(4):
        loss = nn.functional.cross_entropy(model(part), part[:, :4].argmax(1)) * len(part) / len(x)
        loss.backward()
        total += loss.item()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {total:.12f}")
torch.save(model.state_dict(), args.out)
