"""optimizer.step(closure): the loss is computed inside the step."""

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
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(20):
    x = torch.randn(args.batch_size, 8)
    y = x[:, :4].argmax(1)

    def closure(x=x, y=y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    if step % 5 == 4:
        print(f"step {step + 1} loss {loss.item():.12f}")
torch.save(model.state_dict(), args.out)
