"""A copy of the model follows it by exponential moving average, and is evaluated."""

import argparse
import copy

import torch
from model import Net
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Net()
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
held_out = torch.randn(32, 8)
for step in range(20):
    x = torch.randn(args.batch_size, 8)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
    if step % 5 == 4:
        with torch.no_grad():
            score = nn.functional.cross_entropy(average(held_out), held_out[:, :4].argmax(1))
        print(f"step {step + 1} loss {loss.item():.12f} average {score.item():.12f}")
    if step == 9:
        snapshot = copy.deepcopy(model)
both = {"model": model.state_dict(), "average": average.state_dict()}
torch.save(both | {"snapshot": snapshot.state_dict()}, args.out)
