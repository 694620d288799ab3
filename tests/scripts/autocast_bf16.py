"""The script enters autocast by itself, in bf16."""

import argparse

import torch
from model import Net
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(20):
    x = torch.randn(16, 8)
    y = x[:, :4].argmax(1)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        print(f"step {step + 1} loss {loss.item():.6f}")
torch.save(model.state_dict(), args.out)
