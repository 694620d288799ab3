"""Gradients clipped by value; how many were is printed."""

import argparse

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(20):
    x = torch.randn(args.batch_size, 8)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    clipped = sum(int((p.grad.abs() > 0.01).sum()) for p in model.parameters())
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    if step % 5 == 4:
        print(f"step {step + 1} loss {loss.item():.12f} clipped {clipped}")
torch.save(model.state_dict(), args.out)
