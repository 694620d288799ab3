"""An IterableDataset: no length, no sampler."""

import argparse

import torch
from model import Net
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()


class Stream(IterableDataset):
    def __iter__(self):
        draws = torch.Generator().manual_seed(1)
        while True:
            x = torch.randn(8, generator=draws)
            yield x, x[:4].argmax()


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Net()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
for step, (x, y) in enumerate(DataLoader(Stream(), batch_size=args.batch_size), start=1):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.12f}")
    if step == 20:
        break
torch.save(model.state_dict(), args.out)
