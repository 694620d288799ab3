"""Two losses of one forward, each with a backward of its own."""

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(20):
    x = torch.randn(args.batch_size, 8)
    logits = model(x)
    first = nn.functional.cross_entropy(logits, x[:, :4].argmax(1))
    second = logits.square().mean()
    optimizer.zero_grad()
    first.backward(retain_graph=True)
    (0.1 * second).backward()
    optimizer.step()
    if step % 5 == 4:
        print(f"step {step + 1} losses {first.item():.12f} {second.item():.12f}")
torch.save(model.state_dict(), args.out)
